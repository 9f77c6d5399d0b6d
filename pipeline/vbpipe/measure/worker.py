"""The process that opens one candidate and times it when told: `python -m vbpipe.measure.worker IN OUT PARENT`.

Messages travel on the two file descriptors IN and OUT, never on stdout, which belongs to whatever the backend prints.
"""

from __future__ import annotations

import faulthandler
import gc
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from vbpipe import plugins
from vbpipe.core import Backend, Run
from vbpipe.measure import facts, messages, probe
from vbpipe.measure.correctness import fault
from vbpipe.measure.statistics import stable
from vbpipe.processes import die_with

if TYPE_CHECKING:
    import numpy as np

    Arrays = Mapping[str, np.ndarray[Any, Any]]

_BUFFERS = 3  # copies of the inputs, used in turn: a server's inputs are not at one address for ever
_CHUNK_S = 0.01
_MAX_WARMUP_CALLS = 5000


@dataclass(frozen=True)
class Trial:
    """A scenario in this process: copies of its inputs, and what is right."""

    feeds: tuple[Arrays, ...]
    expected: Arrays | None


@dataclass(frozen=True)
class Timing:
    """Wall nanoseconds of each call, processor nanoseconds of this process over all, and the last outputs."""

    ns: tuple[int, ...]
    cpu_ns: int
    outputs: Arrays


Timed = Callable[["Sequence[Arrays]", int], Timing]
"""`time_calls` of one engine: the inputs to use in turn, and how many calls."""


def main(arguments: Sequence[str]) -> None:
    """Serve until the request pipe closes."""
    request_fd, reply_fd, parent = (int(argument) for argument in arguments)
    die_with(parent)
    for fd in (request_fd, reply_fd):
        os.set_inheritable(fd, False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the parent asks a hung worker where it is
    requests, replies = os.fdopen(request_fd, "rb"), os.fdopen(reply_fd, "wb", buffering=0)
    sys.excepthook = _reporter(replies)
    line = requests.readline()
    if line:
        opening = messages.REQUEST.validate_json(line)
        assert isinstance(opening, messages.Open), "the first request opens"
        _serve(opening, requests, replies)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the engine is closed; destructors of vendor libraries at interpreter exit hang now and then


def time_calls(run: Run, feeds: Sequence[Arrays], calls: int, slowdown: float = 0.0) -> Timing:
    """Time `calls` calls (none: no outputs) without garbage collection and with nothing but the clock between them.

    With `slowdown`, each call is made longer by this share of itself before its time is taken.
    """
    ns, clock = [0] * calls, time.perf_counter_ns
    order = [feeds[index % len(feeds)] for index in range(calls)]
    outputs: Arrays = {}
    gc.disable()
    cpu_begin = time.process_time_ns()
    for index, feed in enumerate(order):
        begin = clock()
        outputs = run(feed)
        took = clock() - begin
        ns[index] = took if not slowdown else _work_until(begin + int((1 + slowdown) * took)) - begin
    cpu_ns = time.process_time_ns() - cpu_begin
    gc.enable()
    return Timing(tuple(ns), cpu_ns, outputs)


def warm_up(timed: Timed, feeds: Sequence[Arrays], request: messages.Warm) -> messages.Warmed:
    """Call until chunk medians stop drifting, for at least the asked calls and time, and never past the limit."""
    begin, ns, medians = time.perf_counter(), list[int](), list[float]()
    while True:
        chunk = max(1, math.ceil(_CHUNK_S * 1e9 / max(1, median(ns[-5:])))) if ns else 1
        took = timed(feeds, min(chunk, request.min_calls)).ns
        ns.extend(took)
        medians.append(median(took))
        spent_s = time.perf_counter() - begin
        cut = len(ns) >= 2 and (spent_s >= request.max_s or len(ns) >= _MAX_WARMUP_CALLS)
        enough = len(ns) >= request.min_calls and spent_s >= request.min_s and len(medians) >= 10
        if cut or (enough and stable(medians)):
            return messages.Warmed(tuple(ns), stable(medians))


def _reporter(replies: BinaryIO) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.__excepthook__(kind, error, trace)
        sys.stderr.flush()
        _say(replies, messages.Raised(f"{kind.__name__}: {error}"))

    return report


def _serve(opening: messages.Open, requests: BinaryIO, replies: BinaryIO) -> None:
    _limit(opening)
    begin = time.perf_counter()
    with _engine(opening) as run:
        load_s = time.perf_counter() - begin
        timed = partial(time_calls, run, slowdown=opening.slowdown)
        _say(replies, messages.Progress())
        trials, first_call_ms = dict[str, Trial](), dict[str, float]()
        for load in opening.loads:
            trials[load.scenario] = trial = _trial(load)
            first = timed(trial.feeds, 1)
            first_call_ms[load.scenario] = first.ns[0] / 1e6
            found = fault(first.outputs, trial.expected, opening.min_cosine)
            if found:
                _say(replies, messages.Wrong(f"scenario {load.scenario!r}: {found}"))
                return
            _say(replies, messages.Progress())
        gc.collect()
        gc.freeze()  # what loading left is never garbage: later collections need not look at it
        _say(replies, messages.Opened(load_s, first_call_ms))
        _obey(timed, trials, opening.min_cosine, requests, replies)


def _engine(opening: messages.Open) -> AbstractContextManager[Run]:
    if opening.backend == probe.BACKEND:
        return probe.opened()
    make = cast("Callable[..., Backend]", plugins.backend(opening.backend))
    return make(**opening.options).open(opening.kind, opening.path, opening.threads, opening.root)


def _work_until(end_ns: int) -> int:
    """Keep the core busy until then and return the time.

    With vector instructions, as engines do: after a plain loop of 0.1 ms the next call of an engine was 0.6 % longer
    (+-0.2), after this one 0.1 % (+-0.2), and the copy would be slower than it claims.
    """
    import numpy as np

    small, clock = np.ones(64, np.float32), time.perf_counter_ns
    while (now := clock()) < end_ns:
        small.dot(small)
    return now


def _limit(opening: messages.Open) -> None:
    """Set cores and memory before the backend starts threads, which inherit the cores."""
    if opening.cpus is not None:
        os.sched_setaffinity(0, opening.cpus)
    if opening.memory_limit_mib is not None:
        limit = opening.memory_limit_mib * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _trial(load: messages.Load) -> Trial:
    from safetensors.numpy import load_file

    inputs = load_file(load.inputs)
    feeds = tuple({name: array.copy() for name, array in inputs.items()} for _ in range(_BUFFERS))
    return Trial(feeds, None if load.expected is None else load_file(load.expected))


def _obey(
    timed: Timed, trials: Mapping[str, Trial], min_cosine: float | None, requests: BinaryIO, replies: BinaryIO
) -> None:
    newest: dict[str, Arrays] = {}
    for line in requests:
        request = messages.REQUEST.validate_json(line)
        if isinstance(request, messages.Warm):
            _say(replies, warm_up(timed, trials[request.scenario].feeds, request))
        elif isinstance(request, messages.Pin):
            _pin(request.cpus)
            _say(replies, messages.Pinned())
        elif isinstance(request, messages.Time):
            feeds = trials[request.scenario].feeds
            time.sleep(request.settle_s)
            timed(feeds, request.lead)  # caches, clock and vector units come back over milliseconds
            timing = timed(feeds, request.calls)
            newest[request.scenario] = timing.outputs
            _say(replies, messages.Timed(timing.ns, timing.cpu_ns))
        else:
            found = {name: fault(outputs, trials[name].expected, min_cosine) for name, outputs in newest.items()}
            wrong = [f"scenario {name!r}, after timing: {what}" for name, what in found.items() if what]
            _say(replies, messages.Wrong(wrong[0]) if wrong else _finished(timed, trials))


def _pin(cpus: Sequence[int]) -> None:
    """Move all threads, those of the backend's pools too; threads that start later inherit it."""
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cpus)
        except ProcessLookupError:  # a thread that has just ended
            continue


def _finished(timed: Timed, trials: Mapping[str, Trial]) -> messages.Finished:
    switch_ms = {name: _switch_ms(timed, name, trials) for name in trials} if len(trials) > 1 else {}
    used = resource.getrusage(resource.RUSAGE_SELF)
    return messages.Finished(_peak_rss_mib(), used.ru_nivcsw, used.ru_majflt, facts.affinity(), switch_ms)


def _switch_ms(timed: Timed, name: str, trials: Mapping[str, Trial]) -> float:
    """Time a scenario's first call after one of another: engines may plan again when a shape changes."""
    other = next(trial for title, trial in trials.items() if title != name)
    timed(other.feeds, 1)
    return timed(trials[name].feeds, 1).ns[0] / 1e6


def _peak_rss_mib() -> float:
    """Return this process's own peak. ru_maxrss can't tell: Linux lets it start at the parent's size across exec."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _say(replies: BinaryIO, reply: messages.Reply) -> None:
    rest = memoryview(messages.REPLY.dump_json(reply) + b"\n")
    while rest:  # an unbuffered pipe may take only a part
        rest = rest[replies.write(rest) :]


if __name__ == "__main__":
    main(sys.argv[1:])
