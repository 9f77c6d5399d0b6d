"""Try the measuring on this host: how often it calls equal engines different, and what difference it finds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

from vbpipe.errors import VbpipeError
from vbpipe.measure import messages
from vbpipe.measure.group import opening
from vbpipe.measure.process import Ask, Failure, Worker, close_all, exchange
from vbpipe.measure.protocol import measure
from vbpipe.measure.record import Candidate, Scenario, Settings
from vbpipe.measure.statistics import Verdict, noise_floor, ratio, verdict

NAIVE_CALLS = 20
NAIVE_THRESHOLD = 0.02
RELIABLE = 0.9
"""Share of trials from which on a difference counts as reliably found."""


@dataclass(frozen=True)
class Trial:
    """One measurement of an engine against a copy of itself that is slower by a known share.

    `truth` is the true speed-up of the copy; `naive` is what medians of 20 calls of one, then 20 of the other, say of
    the same pair, each in one fresh process.
    """

    delay: float
    truth: float
    value: float
    low: float
    high: float
    floor: float
    verdict: Verdict
    naive: float
    groups: int
    seconds: float

    @property
    def half_width(self) -> float:
        """Return half the interval's width, relative to the value; infinite where one group was all that fitted."""
        return math.sqrt(self.high / self.low) - 1 if self.low > 0 else math.inf

    @property
    def covered(self) -> bool:
        """Return whether the interval holds the true ratio."""
        return self.low <= self.truth <= self.high

    @property
    def wrong(self) -> bool:
        """Return whether the verdict names a difference that is not there, or the wrong direction."""
        return self.verdict == "faster" or (self.verdict == "slower" and self.delay == 0)

    @property
    def naive_wrong(self) -> bool:
        """Return whether naive timing claims a difference of over 2 % between equal engines."""
        return self.delay == 0 and abs(self.naive - 1) > NAIVE_THRESHOLD


@dataclass(frozen=True)
class NoiseSummary:
    """What trials of one delay came to; shares are of all trials."""

    delay: float
    trials: int
    wrong: float
    naive_wrong: float
    found: float
    """Share with the verdict "slower"."""
    covered: float
    half_width: float
    """Median half width of the intervals: 0.01 is +-1 %."""
    floor: float
    seconds: float


def run_trial(candidate: Candidate, scenario: Scenario, settings: Settings, delay: float) -> Trial:
    """Measure an engine against its copy, `delay` (0.05 is 5 %) slower; raises VbpipeError when it can't be timed."""
    begin = time.monotonic()
    base = replace(candidate, name="base")
    copy = replace(candidate, name="copy", slowdown=delay)
    found = measure([base, copy], [scenario], settings, baseline="base")
    seconds = time.monotonic() - begin
    for outcome in found.outcomes:
        if outcome.status != "measured":
            raise VbpipeError(f"the engine can't be timed: {outcome.status}: {outcome.message}", where=candidate.name)
    got = ratio(found, "copy", "base", scenario.name)
    floor = noise_floor(found, scenario.name)
    return Trial(
        delay=delay,
        truth=1 / (1 + delay),
        value=got.value,
        low=got.low,
        high=got.high,
        floor=floor,
        verdict=verdict(got, settings.margin, floor),
        naive=naive_ratio(base, copy, scenario, settings),
        groups=got.groups,
        seconds=seconds,
    )


def naive_ratio(base: Candidate, copy: Candidate, scenario: Scenario, settings: Settings) -> float:
    """Return what most tools would say: 20 calls of one, then 20 of the other, and the ratio of their medians."""
    times = [_naive_ms(one, scenario, settings) for one in (base, copy)]
    return times[0] / times[1]


def summarize(trials: Sequence[Trial]) -> NoiseSummary:
    """Return shares over trials of one delay."""
    return NoiseSummary(
        delay=trials[0].delay,
        trials=len(trials),
        wrong=fmean(trial.wrong for trial in trials),
        naive_wrong=fmean(trial.naive_wrong for trial in trials),
        found=fmean(trial.verdict == "slower" for trial in trials),
        covered=fmean(trial.covered for trial in trials),
        half_width=median(trial.half_width for trial in trials),
        floor=median(trial.floor for trial in trials),
        seconds=fmean(trial.seconds for trial in trials),
    )


def run_trials(
    candidate: Candidate,
    scenario: Scenario,
    settings: Settings,
    delays: Sequence[float],
    count: int,
    each: Callable[[Trial], None] = lambda _trial: None,
) -> tuple[NoiseSummary, ...]:
    """Run `count` trials of every delay, delays in turn so that drift meets all alike; `each` is called after each."""
    trials: dict[float, list[Trial]] = {delay: [] for delay in delays}
    for index in range(count):
        for delay in delays:
            trial = run_trial(candidate, scenario, replace(settings, seed=index), delay)
            trials[delay].append(trial)
            each(trial)
    return tuple(summarize(of_one) for of_one in trials.values())


def reliably_found(summaries: Sequence[NoiseSummary]) -> float | None:
    """Return the smallest delay that, like all larger ones, was found in nine of ten trials; None if none was."""
    smallest = None
    for summary in sorted((one for one in summaries if one.delay > 0), key=lambda one: -one.delay):
        if summary.found < RELIABLE:
            break
        smallest = summary.delay
    return smallest


def advice(summaries: Sequence[NoiseSummary], cores: int, load_1m: float) -> tuple[str, ...]:
    """Return what would make this host tell smaller differences apart."""
    found: list[str] = []
    worst = max(summary.half_width for summary in summaries)
    if load_1m > 0.5 * cores:
        found.append(f"the load is {load_1m:.1f} on {cores} cores: close what else is running.")
    if worst == math.inf:
        found.append("not even two groups fit into the budget: give several times as much.")
    elif worst > 0.02:
        factor = (worst / 0.02) ** 2
        found.append(f"intervals are +-{worst:.1%}; for +-2 % give about {factor:.0f} times the budget (budget_s).")
    if any(summary.floor > 0.02 for summary in summaries):
        found.append(
            "the engine differs from itself by more than 2 %: pin it to cores of its own, or use fewer threads."
        )
    return tuple(found)


def _naive_ms(candidate: Candidate, scenario: Scenario, settings: Settings) -> float:
    with TemporaryDirectory(prefix="vbpipe-naive-") as folder:
        worker = Worker(Path(folder) / "log", settings.threads)
        try:
            _answer(worker, opening(candidate, (scenario,), {}, settings), settings)
            timed = _answer(worker, messages.Time(scenario.name, 1, NAIVE_CALLS, 0.0), settings)
        finally:
            close_all([worker], at_once=False)
    assert isinstance(timed, messages.Timed)
    return median(timed.ns) / 1e6


def _answer(worker: Worker, request: messages.Request, settings: Settings) -> messages.Reply:
    reply = exchange([Ask(worker, request, settings.start_timeout_s)], 1)[worker]
    if isinstance(reply, Failure):
        raise VbpipeError(f"the engine can't be timed: {reply.status}: {reply.message}")
    return reply
