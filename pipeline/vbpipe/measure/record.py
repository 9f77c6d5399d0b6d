"""What a measurement is asked for and what it holds: frozen values with a versioned JSON form."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import JsonValue, TypeAdapter, ValidationError

from vbpipe.errors import UsageError, VbpipeError
from vbpipe.measure.facts import HostFacts

FORMAT = 2
"""Version of the JSON form; raise it when a reader of the old form would misread the new one."""

FILE = "measurement.json.gz"
"""What a measurement is called in a folder: raw times are long and alike."""

CONTROL_SUFFIX = "#aa"
"""Ends the name of the baseline's second worker, whose ratio to the first is known to be 1."""

Status = Literal["measured", "crashed", "hung", "failed", "wrong", "pending"]
"""pending: not tried, for this host can't run it."""


@dataclass(frozen=True)
class Candidate:
    """One thing to time: an artifact and the backend that opens it.

    `min_cosine`, where given, is the least cosine similarity to the expected outputs, per floating output. `slowdown`
    makes every call longer by this share of itself, in a busy wait: a slowed copy of known size, to try the measuring.
    `expected` is its own right outputs, scenario to safetensors file, in place of those that all candidates share.
    """

    name: str
    backend: str
    options: Mapping[str, JsonValue]
    kind: str
    path: Path
    root: Path | None = None
    min_cosine: float | None = None
    slowdown: float = 0.0
    expected: Mapping[str, Path] | None = None


@dataclass(frozen=True)
class Scenario:
    """One set of inputs ("batch=1,seq=16"): a safetensors file that maps input names to arrays."""

    name: str
    inputs: Path


@dataclass(frozen=True)
class Settings:
    """How to measure. The defaults fit calls of 1 to 100 ms.

    Args:
        threads: computing threads of every candidate.
        min_groups, max_groups: fresh sets of processes; the interval is taken over them.
        precision: stop when the 95 % interval of every ratio to the baseline is at most this wide to each side.
        budget_s: time for everything, starts included. Blocks and warm-ups shrink so that `min_groups` fit.
        margin: ratios within 1 +- margin count as the same.
        seed: of every random order.
        warmup_min_calls, warmup_min_s: the least warm-up of a worker per scenario, where the budget allows it.
        warmup_max_s: a warm-up that has not settled by then is cut and flagged.
        block_s: aim for the timed part of a block; a slow candidate still gets one or two calls.
        lead_s: untimed calls before a block, at least one: a worker that takes over is slow for milliseconds.
        settle_s: silence before a block of several threads, for those of the worker before it to stop spinning.
        start_timeout_s, call_timeout_s: a worker that takes longer to open, or for a call, is hung. Requests for many
            calls get more, by what a call has taken so far.
        cpus: the cores that workers may use, `threads` of which those of a group share while they are timed (see
            `placement`); None stands for those that this process may use.
        memory_limit_mib: address space of a worker; None sets no limit.
        control: measure the baseline twice, to learn how much of a difference is noise.
    """

    threads: int = 1
    min_groups: int = 8
    max_groups: int = 40
    precision: float = 0.02
    budget_s: float = 120.0
    margin: float = 0.02
    seed: int = 0
    warmup_min_calls: int = 20
    warmup_min_s: float = 0.5
    warmup_max_s: float = 10.0
    block_s: float = 0.015
    lead_s: float = 0.015
    settle_s: float = 0.003
    start_timeout_s: float = 120.0
    call_timeout_s: float = 30.0
    cpus: tuple[int, ...] | None = None
    memory_limit_mib: int | None = None
    control: bool = True

    def __post_init__(self) -> None:
        if self.threads < 1 or self.budget_s <= 0 or self.precision <= 0 or self.margin < 0:
            raise UsageError("threads, budget_s and precision must be above zero, margin not below.", where="measure")
        if not 2 <= self.min_groups <= self.max_groups:
            raise UsageError("2 <= min_groups <= max_groups must hold: one group has no interval.", where="measure")


@dataclass(frozen=True)
class ScenarioRun:
    """One worker's times in one scenario. `blocks_ns` has one block per round, one entry per timed call.

    `first_call_ms` is the process's very first only in the first scenario; in later ones it shows what new shapes cost.
    `warmup_stable` is None where the budget left too few calls to judge. `cpus_used` is processor time over wall time
    in the blocks. `switch_ms` is one call right after a call of another scenario, after all blocks; None where there is
    only one scenario.
    """

    first_call_ms: float
    warmup_ns: tuple[int, ...]
    warmup_stable: bool | None
    blocks_ns: tuple[tuple[int, ...], ...]
    cpus_used: float
    switch_ms: float | None = None


@dataclass(frozen=True)
class WorkerRun:
    """One worker process. Starts overlap two at a time, so `start_s` and `load_s` are a little pessimistic.

    Args:
        start_s: from starting the interpreter to a loaded engine.
        load_s: entering the backend's `open`, the imports of its SDK included.
        peak_rss_mib: largest resident memory, the interpreter and its libraries included.
        preempted: involuntary context switches in all.
        major_faults: page faults that went to a disk in all.
        affinity: the cores that it could use while it was timed.
        runs: scenario name to times.
    """

    candidate: str
    start_s: float
    load_s: float
    peak_rss_mib: float
    preempted: int
    major_faults: int
    affinity: tuple[int, ...]
    runs: Mapping[str, ScenarioRun]


@dataclass(frozen=True)
class Group:
    """One set of fresh workers, timed in turn.

    Args:
        workers: those that came through; a worker that failed has no times.
        orders: scenario name to the order of the candidates in each round.
        wall_s: the whole group.
        overhead_s: the part of it that went into starting and ending the workers.
        load_1m: load average before its start.
        steal_share: share of processor time that the hypervisor took during the blocks.
        throttled: periods in which the cgroup's quota stopped us during the blocks.
        other_cpus: cores' worth of work by processes that are not ours during the blocks.
    """

    workers: tuple[WorkerRun, ...]
    orders: Mapping[str, tuple[tuple[str, ...], ...]]
    wall_s: float
    overhead_s: float
    load_1m: float
    steal_share: float
    throttled: int
    other_cpus: float


@dataclass(frozen=True)
class Outcome:
    """How a candidate fared. `message` and `log_tail` are empty when it was measured."""

    candidate: str
    status: Status
    message: str = ""
    log_tail: str = ""


@dataclass(frozen=True)
class Concern:
    """Something wrong with a measurement: a code for programs ("warmup_not_stable") and a sentence for people."""

    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


@dataclass(frozen=True)
class Measurement:
    """Raw values of one measurement; `vbpipe.measure.statistics` reads ratios, percentiles and verdicts from it.

    `control` is the name of the baseline's second worker, None if there was none.
    """

    baseline: str
    control: str | None
    scenarios: tuple[str, ...]
    settings: Settings
    host: HostFacts
    elapsed_s: float
    groups: tuple[Group, ...]
    outcomes: tuple[Outcome, ...]
    problems: tuple[Concern, ...] = ()
    format: int = FORMAT

    @property
    def measured(self) -> tuple[str, ...]:
        """Return the names of the candidates that have times, in the order asked for, the control last."""
        return tuple(outcome.candidate for outcome in self.outcomes if outcome.status == "measured")

    def outcome(self, candidate: str) -> Outcome:
        """Return how `candidate` fared; raises VbpipeError for a name that was not part of this measurement."""
        for outcome in self.outcomes:
            if outcome.candidate == candidate:
                return outcome
        known = ", ".join(outcome.candidate for outcome in self.outcomes)
        raise VbpipeError(f"no candidate {candidate!r} in this measurement.", hint=f"It has: {known}.")

    def save(self, folder: Path) -> None:
        """Write the measurement into a folder; equal measurements give equal bytes."""
        (folder / FILE).write_bytes(gzip.compress(self.to_json().encode(), mtime=0))

    @staticmethod
    def load(folder: Path) -> Measurement:
        """Read what `save` wrote; raises VbpipeError for anything else."""
        try:
            text = gzip.decompress((folder / FILE).read_bytes())
        except (OSError, EOFError, zlib.error) as error:
            raise VbpipeError(f"there is no readable measurement: {error}.", where=str(folder)) from error
        return Measurement.from_json(text)

    def to_json(self) -> str:
        """Return the measurement as JSON text."""
        return _adapter().dump_json(self).decode()

    @staticmethod
    def from_json(text: str | bytes) -> Measurement:
        """Read what `to_json` wrote; raises VbpipeError for anything else, a newer format included."""
        try:
            found = _adapter().validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise VbpipeError(f"not a measurement: {place}: {first['msg']}.", hint="Measure again.") from error
        if found.format != FORMAT:
            raise VbpipeError(
                f"a measurement of format {found.format}; this version reads format {FORMAT}.", hint="Measure again."
            )
        return found


@cache
def _adapter() -> TypeAdapter[Measurement]:
    """Return the JSON form's reader and writer; made late because every worker imports this module."""
    return TypeAdapter(Measurement)
