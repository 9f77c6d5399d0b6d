"""The measuring process's side of a worker: start it, ask it, and know why it does not answer."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from vbpipe.measure import messages
from vbpipe.measure.record import Status
from vbpipe.processes import describe_exit, environment, out_of_memory, python_command

_POLL_S = 0.25
_CLOSE_S = 5.0
_TAIL_BYTES = 4000
_TAIL_LINES = 30
_LONGEST_LINE = 4 * 2**20
"""Bytes without an end of line that no message has: the longest, of all warm-up calls, has some tens of thousands."""

_ANSWERS: Mapping[type[messages.Request], type[messages.Reply]] = {
    messages.Open: messages.Opened,
    messages.Warm: messages.Warmed,
    messages.Pin: messages.Pinned,
    messages.Time: messages.Timed,
    messages.Finish: messages.Finished,
}


@dataclass(frozen=True)
class Failure:
    """Why a worker gives no times, with the end of what it printed."""

    status: Status
    message: str
    log_tail: str


@dataclass(frozen=True)
class Ask:
    """One request. A worker that says nothing for `timeout_s` is hung."""

    worker: Worker
    request: messages.Request
    timeout_s: float


class Worker:
    """One child process; it starts with its first request, so that a queue of them starts a few at a time.

    Args:
        log: file for everything it prints.
        threads: value of the environment's thread counts.
    """

    def __init__(self, log: Path, threads: int) -> None:
        self._log = log
        self._threads = threads
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = -1
        self._replies = -1
        self._unread = b""
        self._began = 0.0
        self._asked: messages.Request | None = None
        self._progressed = 0
        self._memory_limit_mib: int | None = None
        self.start_s = 0.0
        """From starting the interpreter to the first sign of a loaded engine."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when the worker has said something or is gone."""
        return self._replies

    @property
    def pid(self) -> int:
        """Return the process id; 0 before it started."""
        return self._process.pid if self._process else 0

    def send(self, request: messages.Request) -> None:
        """Send a request, starting the process first if need be. A worker that is gone is noticed by `receive`."""
        if self._process is None:
            self._spawn()
        self._asked = request
        if isinstance(request, messages.Open):
            self._memory_limit_mib = request.memory_limit_mib
        rest = messages.REQUEST.dump_json(request) + b"\n"
        try:
            while rest:
                rest = rest[os.write(self._requests, rest) :]
        except BrokenPipeError:
            return

    def receive(self) -> tuple[messages.Reply | Failure, ...]:
        """Return all replies that are complete, perhaps none yet; call it when readable.

        All at once: what has been read makes the descriptor readable no more.
        """
        read = os.read(self._replies, 1 << 16)
        if not read:
            return (self._gone(),)
        *lines, self._unread = (self._unread + read).split(b"\n")
        if len(self._unread) > _LONGEST_LINE:
            return (self._strange(),)
        return tuple(self._understand(line) for line in lines)

    def hung(self, timeout_s: float) -> Failure:
        """Have it write its stacks to the log, kill it, and return the failure."""
        assert self._process is not None, "only a started worker can hang"
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        tail = self._tail()
        self.kill()
        return Failure("hung", f"no answer for {round(timeout_s, 1):g} s.", tail)

    def let_go(self) -> None:
        """Close its request pipe: it closes its engine and exits."""
        if self._requests >= 0:
            os.close(self._requests)
            self._requests = -1

    def wait(self, timeout_s: float) -> None:
        """Wait for it to exit, and kill it after `timeout_s`."""
        self.let_go()
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
        if self._replies >= 0:
            os.close(self._replies)
            self._replies = -1

    def kill(self) -> None:
        """Kill it and the processes that it started."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # it leads its own session; unreaped, so the id is still its
            self._process.wait()

    def _spawn(self) -> None:
        theirs_in, self._requests = os.pipe()
        self._replies, theirs_out = os.pipe()
        command = python_command("vbpipe.measure.worker", str(theirs_in), str(theirs_out), str(os.getpid()))
        self._began = time.monotonic()
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment(self._threads),
                    pass_fds=(theirs_in, theirs_out),
                    start_new_session=True,
                )
        finally:
            os.close(theirs_in)
            os.close(theirs_out)

    def _understand(self, line: bytes) -> messages.Reply | Failure:
        try:
            reply = messages.REPLY.validate_json(line)
        except ValidationError:
            return self._strange()
        if isinstance(reply, messages.Raised):
            return self._raised(reply)
        if isinstance(reply, messages.Wrong):
            return Failure("wrong", reply.message, self._tail())
        if not self._fits(reply):
            return self._strange()
        if not self.start_s:
            self.start_s = time.monotonic() - self._began
        return reply

    def _fits(self, reply: messages.Reply) -> bool:
        """Return whether the reply is one to the request, with as many times as were asked for and none below zero."""
        asked = self._asked
        assert asked is not None, "a worker starts with its first request"
        if isinstance(reply, messages.Progress):
            self._progressed += 1
            return isinstance(asked, messages.Open) and self._progressed <= 1 + len(asked.loads)
        if not isinstance(reply, _ANSWERS[type(asked)]):
            return False
        if isinstance(reply, messages.Opened):
            assert isinstance(asked, messages.Open), "the table above says so"
            return reply.first_call_ms.keys() == {load.scenario for load in asked.loads}
        if isinstance(reply, messages.Timed):
            return isinstance(asked, messages.Time) and len(reply.ns) == asked.calls and min(reply.ns) > 0
        return not isinstance(reply, messages.Warmed) or (len(reply.ns) > 0 and min(reply.ns) > 0)

    def _strange(self) -> Failure:
        return Failure("failed", "it wrote into the pipe that is for messages only.", self._tail())

    def _raised(self, reply: messages.Raised) -> Failure:
        memory = out_of_memory(reply.message, self._memory_limit_mib)
        return Failure("failed", f"{reply.message}. {memory}" if memory else reply.message, self._tail())

    def _gone(self) -> Failure:
        assert self._process is not None, "only a started worker has a pipe"
        try:
            code = self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return Failure("crashed", "it closed the pipe for messages and went on running.", self._tail())
        tail = self._tail()
        return Failure("crashed", describe_exit(code, self._memory_limit_mib, tail), tail)

    def _tail(self) -> str:
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
        printable = "".join(char for char in text if char.isprintable() or char in "\n\t")
        return "\n".join(printable.splitlines()[-_TAIL_LINES:])


def exchange(asks: Sequence[Ask], slots: int) -> Mapping[Worker, messages.Reply | Failure]:
    """Put requests to workers, at most `slots` at work at a time in the order given, and return their answers."""
    answers: dict[Worker, messages.Reply | Failure] = {}
    waiting = list(reversed(asks))
    busy: dict[Worker, tuple[Ask, float]] = {}
    while waiting or busy:
        while waiting and len(busy) < slots:
            ask = waiting.pop()
            ask.worker.send(ask.request)
            busy[ask.worker] = (ask, time.monotonic() + ask.timeout_s)
        soonest_s = min(deadline for _, deadline in busy.values()) - time.monotonic()
        readable, _, _ = select.select(list(busy), [], [], max(0.0, min(soonest_s, _POLL_S)))
        for worker in readable:
            ask, _ = busy[worker]
            for reply in worker.receive():
                if worker not in busy:
                    continue  # it has answered; more can only be a complaint on its way out
                if isinstance(reply, messages.Progress):
                    busy[worker] = (ask, time.monotonic() + ask.timeout_s)
                else:
                    answers[worker] = reply
                    del busy[worker]
        for worker, (ask, deadline) in list(busy.items()):
            if time.monotonic() > deadline:
                answers[worker] = worker.hung(ask.timeout_s)
                del busy[worker]
    return answers


def close_all(workers: Sequence[Worker], *, at_once: bool) -> None:
    """End all workers: by closing their pipes and waiting a few seconds, or `at_once`."""
    for worker in workers:
        worker.kill() if at_once else worker.let_go()
    deadline = time.monotonic() + _CLOSE_S
    for worker in workers:
        worker.wait(max(0.0, deadline - time.monotonic()))
