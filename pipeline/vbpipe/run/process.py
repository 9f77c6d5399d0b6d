"""Start one step's process, follow its progress, and end it in time."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vbpipe.errors import StepFailed
from vbpipe.processes import describe_exit, environment, python_command
from vbpipe.run.job import Job, result_path
from vbpipe.run.worker import PARENT, PROGRESS_FD

_TICK_S = 0.2
_TAIL_BYTES = 4000
_FULL_BYTES = 2**20
"""Less free space than this is none."""


class StepProcess:
    """One job in a process of its own. `log` holds everything that it printed."""

    def __init__(self, job: Job, scratch: Path, timeout_s: float | None, stop: threading.Event) -> None:
        self.log = scratch / "log.txt"
        self._job = job
        self._path = scratch / "job.json"
        self._timeout_s = timeout_s
        self._stop = stop

    def run(self, progress: Callable[[float | None, str], None]) -> Mapping[str, Any]:
        """Run the job to its end and return its artifact's meta.

        Raises:
            StepFailed: it failed, died, took too long, or was stopped; the message says which.
        """
        self._path.write_text(json.dumps(self._job.to_json()), encoding="utf-8")
        reading, writing = os.pipe()
        try:
            try:
                process = self._start(writing)
            finally:
                os.close(writing)
            try:
                self._follow(process, reading, progress)
            finally:
                _end(process)
        finally:
            os.close(reading)
        return self._result(process.returncode)

    def _start(self, pipe: int) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as log:
            return subprocess.Popen(
                python_command("vbpipe.run.worker", str(self._path)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(
                    self._job.threads, PYTHONFAULTHANDLER="1", **{PROGRESS_FD: str(pipe), PARENT: str(os.getpid())}
                ),
                pass_fds=(pipe,),
                start_new_session=True,
            )

    def _follow(
        self, process: subprocess.Popen[bytes], pipe: int, progress: Callable[[float | None, str], None]
    ) -> None:
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            open_pipe = True
            while process.poll() is None:
                if self._stop.is_set():
                    raise StepFailed("stopped.")
                if deadline is not None and time.monotonic() > deadline:
                    raise StepFailed(
                        f"it took longer than {self._timeout_s:g} s and was stopped.",
                        hint="Give it more with --timeout.",
                    )
                if not open_pipe:
                    self._stop.wait(_TICK_S / 10)
                    continue
                if selector.select(_TICK_S):
                    chunk = os.read(pipe, 65536)
                    open_pipe = bool(chunk)
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        progress(*_parsed(line))

    def _result(self, code: int) -> Mapping[str, Any]:
        try:
            result = json.loads(result_path(self._path).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            # Libraries abort on a full disk without a word of why.
            full = shutil.disk_usage(self._path.parent).free < _FULL_BYTES
            hint = "The store's disk is full: free space there, or use a store on another one." if full else ""
            raise StepFailed(describe_exit(code, said=self._log_end()), hint=hint) from None
        if "meta" in result:
            meta: Mapping[str, Any] = result["meta"]
            return meta
        error = result["error"]
        raise StepFailed(error["what"], where=error["where"], hint=error["hint"])

    def _log_end(self) -> str:
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            return log.read().decode(errors="replace")


def _parsed(line: bytes) -> tuple[float | None, str]:
    try:
        fraction, message = json.loads(line)
        return fraction, str(message)
    except (ValueError, TypeError):
        return None, ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the step's process and whatever it started: they share a session of their own."""
    # Also when it has ended by itself: what it left running has its group.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
