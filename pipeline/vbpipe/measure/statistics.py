"""Read ratios, intervals, percentiles and verdicts from raw times; pure functions only.

The unit of replication is a group of fresh processes: a group gives one value per comparison, and the interval is taken
over groups. Blocks and calls inside a group are not independent and never widen the sample (see `group_values`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median, stdev
from typing import Literal

from vbpipe.errors import VbpipeError
from vbpipe.measure.record import CONTROL_SUFFIX, Group, Measurement, Settings, WorkerRun

Verdict = Literal["faster", "slower", "same", "inconclusive"]

P99_MIN_SAMPLES = 662
"""MLPerf LoadGen's floor for a 99th percentile: fewer calls can't bound it with confidence."""

P99_BOUND_SAMPLES = 299
"""From here on the largest sample is above the 99th percentile with 95 % confidence: 0.99 ** 299 < 0.05."""

_LEVEL = 0.95
_LOOKING = 0.7
"""Share of the error that an interval may spend when its width decides when to stop, which favours groups that happen
to agree: plain t intervals then miss the truth up to 6.9 % of the time (simulated: 8 to 40 normal groups), these 5.0 %.
"""
_TREND_BLOCKS = 10
_UNBOUNDED = 100.0
"""On the log scale: an interval that reaches so far, from two groups that disagree, says nothing."""


@dataclass(frozen=True)
class Ratio:
    """How many times faster `candidate` is than `over`: value > 1 is faster, 0..inf is "no idea".

    `low` and `high` bound it with confidence `level`.
    """

    candidate: str
    over: str
    scenario: str
    value: float
    low: float
    high: float
    groups: int
    level: float

    @property
    def half_width(self) -> float:
        """Return half the interval's width, relative to the value: 0.01 is +-1 %."""
        return math.sqrt(self.high / self.low) - 1 if self.low > 0 else math.inf


@dataclass(frozen=True)
class Latency:
    """Times of all timed calls of a candidate in a scenario.

    `p99_ms` is None below 662 samples; `p99_below_ms` is a bound for it (95 %), None below 299. `outliers` counts the
    samples beyond Tukey's fences (1.5 interquartile ranges); they are in every other number.
    """

    samples: int
    p50_ms: float
    p90_ms: float
    p99_ms: float | None
    p99_below_ms: float | None
    outliers: int


def ratio(measurement: Measurement, candidate: str, over: str, scenario: str, *, comparisons: int = 1) -> Ratio:
    """Compare two candidates of one measurement.

    Args:
        measurement: the raw values.
        candidate: the one of interest.
        over: what it is compared with.
        scenario: the inputs.
        comparisons: how many ratios are judged together. The interval's level is 1 - 0.05 / comparisons (Bonferroni),
            so all of them hold at once with 95 %. Bonferroni and not Holm: Holm rejects a little more often but leaves
            no interval to show beside the verdict.

    Raises:
        VbpipeError: a candidate was not measured, or there is no such scenario.
    """
    values = group_values(measurement, candidate, over, scenario)
    level = 1 - (1 - _LEVEL) / comparisons
    centre, half = interval(values, spent_level(measurement.settings, level))
    bounded = half < _UNBOUNDED
    low, high = (math.exp(centre - half), math.exp(centre + half)) if bounded else (0.0, math.inf)
    return Ratio(candidate, over, scenario, math.exp(centre), low, high, len(values), level)


def group_values(measurement: Measurement, candidate: str, over: str, scenario: str) -> tuple[float, ...]:
    """Return one log-ratio per group: see `log_ratio`."""
    for name in (candidate, over):
        outcome = measurement.outcome(name)
        if outcome.status != "measured":
            raise VbpipeError(f"{name!r} has no times: {outcome.status}. {outcome.message}", hint="See its log.")
    if scenario not in measurement.scenarios:
        raise VbpipeError(f"no scenario {scenario!r}.", hint=f"There are: {', '.join(measurement.scenarios)}.")
    values = (group_value(group, candidate, over, scenario) for group in measurement.groups)
    return tuple(value for value in values if value is not None)


def group_value(group: Group, candidate: str, over: str, scenario: str) -> float | None:
    """Return the log-ratio of one group; None where one of the two has no times in it.

    A candidate that two workers of the group ran, as the baseline and its control do, counts by the mean over both:
    half the scatter that one process happens to bring. The mean is taken last: rounds averaged over two workers are
    less skewed than those of one, midmeans move with skewness, and equal candidates differed by 0.3 to 0.6 %.
    """
    ours = [worker.runs[scenario].blocks_ns for worker in group.workers if _runs(worker, candidate, over)]
    theirs = [worker.runs[scenario].blocks_ns for worker in group.workers if _runs(worker, over, candidate)]
    values = [log_ratio(a, b) for a in ours for b in theirs if a and b]
    return fmean(values) if values else None


def log_ratio(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Return the midmean over rounds of log(median theirs / median ours); blocks of a round are neighbours in time."""
    return midmean(round_ratios(ours, theirs))


def round_ratios(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> list[float]:
    """Return log(median theirs / median ours) for each round."""
    return [math.log(median(b) / median(a)) for a, b in zip(ours, theirs, strict=True)]


def midmean(values: Sequence[float]) -> float:
    """Return the mean of the middle half: a quarter of the rounds may be disturbed, and the rest still count fully.

    Under normal noise its standard error is an eighth smaller than the median's: their asymptotic
    variances are 1.19 and pi / 2 times the mean's.
    """
    cut = len(values) // 4
    return fmean(sorted(values)[cut : len(values) - cut])


def interval(values: Sequence[float], level: float = _LEVEL) -> tuple[float, float]:
    """Return the mean and the half width of its Student t interval; infinitely wide below two values."""
    if len(values) < 2:
        return (values[0] if values else 0.0), math.inf
    return fmean(values), t_quantile(0.5 + level / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))


def spent_level(settings: Settings, level: float = _LEVEL) -> float:
    """Return the level of the t interval that holds with `level` when the number of groups may depend on its width."""
    return 1 - (1 - level) * (_LOOKING if settings.max_groups > settings.min_groups else 1.0)


def precise(values: Sequence[float], settings: Settings) -> bool:
    """Return whether the 95 % interval of the ratio is at most +- `settings.precision` wide."""
    return math.expm1(min(interval(values, spent_level(settings))[1], 1.0)) <= settings.precision


def noise_floor(measurement: Measurement, scenario: str | None = None) -> float:
    """Return the largest difference that the baseline's ratio to itself can't exclude: 0.01 is 1 %.

    That is the far end of the A/A interval: it grows with noise and with bias. Without `scenario`, the largest of all.
    Infinite without a control.
    """
    control, baseline = measurement.control, measurement.baseline
    if control not in measurement.measured or baseline not in measurement.measured:
        return math.inf
    assert control is not None
    scenarios = measurement.scenarios if scenario is None else (scenario,)
    return max(_farthest(ratio(measurement, control, baseline, name)) for name in scenarios)


def verdict(found: Ratio, margin: float, noise_floor: float) -> Verdict:
    """Judge a ratio.

    "faster" and "slower": 1 lies outside the interval widened by the noise floor (see `widen`), and the ratio itself
    is beyond 1 + margin or 1 / (1 + margin). "same": the whole interval lies between these two, on a machine whose
    noise floor is no wider than that; a noisy one can't tell that two things are equal. "inconclusive": anything else.
    The bounds mirror each other, so A over B and B over A never contradict.
    """
    low, high = widen(found.value, found.low, found.high, noise_floor)
    if low > 1 and found.value > 1 + margin:
        return "faster"
    if high < 1 and found.value < 1 / (1 + margin):
        return "slower"
    if noise_floor <= margin and 1 / (1 + margin) <= found.low and found.high <= 1 + margin:
        return "same"
    return "inconclusive"


def widen(value: float, low: float, high: float, noise_floor: float) -> tuple[float, float]:
    """Return a ratio's interval with the noise floor as one more error in it: 0 and infinity when either has no bound.

    The two are uncorrelated, so their widths add as squares, on the log scale.
    """
    if low <= 0 or math.inf in (high, noise_floor):
        return 0.0, math.inf
    floor = math.log1p(noise_floor)
    if math.log(high / low) > 2 * _UNBOUNDED:
        return 0.0, math.inf
    below, above = math.hypot(math.log(value / low), floor), math.hypot(math.log(high / value), floor)
    return value * math.exp(-below), value * math.exp(above)


@dataclass(frozen=True)
class ColdStart:
    """What a candidate costs before it is warm: medians over its workers.

    Args:
        process_s: the interpreter and the inputs, up to the backend's `open`.
        load_s: the backend's `open`, its SDK's import included.
        first_ms: scenario to its first call in the process.
        switch_ms: scenario to a warm call right after one of another scenario; empty with one scenario.
        peak_rss_mib: largest resident memory of the process.
    """

    process_s: float
    load_s: float
    first_ms: Mapping[str, float]
    switch_ms: Mapping[str, float]
    peak_rss_mib: float


def cold_start(measurement: Measurement, candidate: str) -> ColdStart | None:
    """Return what a candidate costs before it is warm; None when it has no complete worker."""
    workers = [w for group in measurement.groups for w in group.workers if w.candidate == candidate]
    if not workers:
        return None
    first: dict[str, float] = {}
    switch: dict[str, float] = {}
    for scenario in measurement.scenarios:
        runs = [worker.runs[scenario] for worker in workers if scenario in worker.runs]
        switched = [run.switch_ms for run in runs if run.switch_ms is not None]
        if runs:
            first[scenario] = median(run.first_call_ms for run in runs)
        if switched:
            switch[scenario] = median(switched)
    return ColdStart(
        process_s=median(max(0.0, worker.start_s - worker.load_s) for worker in workers),
        load_s=median(worker.load_s for worker in workers),
        first_ms=first,
        switch_ms=switch,
        peak_rss_mib=median(worker.peak_rss_mib for worker in workers),
    )


def latency(measurement: Measurement, candidate: str, scenario: str) -> Latency | None:
    """Return percentiles over every timed call; None when there is none."""
    samples = sorted(
        ns
        for group in measurement.groups
        for worker in group.workers
        if worker.candidate == candidate and scenario in worker.runs
        for block in worker.runs[scenario].blocks_ns
        for ns in block
    )
    if not samples:
        return None
    first, third = percentile(samples, 0.25), percentile(samples, 0.75)
    reach = 1.5 * (third - first)
    return Latency(
        samples=len(samples),
        p50_ms=percentile(samples, 0.5) / 1e6,
        p90_ms=percentile(samples, 0.9) / 1e6,
        p99_ms=percentile(samples, 0.99) / 1e6 if len(samples) >= P99_MIN_SAMPLES else None,
        p99_below_ms=samples[-1] / 1e6 if len(samples) >= P99_BOUND_SAMPLES else None,
        outliers=sum(not first - reach <= ns <= third + reach for ns in samples),
    )


def percentile(ascending: Sequence[float], share: float) -> float:
    """Return a percentile by linear interpolation between the closest ranks."""
    place = share * (len(ascending) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (ascending[above] - ascending[below]) * (place - below)


def stable(medians: Sequence[float], tolerance: float = 0.01) -> bool | None:
    """Return whether the last ten values have stopped to drift; None below four values.

    They have when the least-squares line changes by at most `tolerance` from end to end, or by less than two standard
    errors of that change: on a noisy machine no line is ever flat, and waiting for one would never end.
    """
    window = medians[-_TREND_BLOCKS:]
    count = len(window)
    if count < 4:
        return None
    centre, mean = (count - 1) / 2, fmean(window)
    spread = sum((index - centre) ** 2 for index in range(count))
    slope = sum((index - centre) * (value - mean) for index, value in enumerate(window)) / spread
    rest = sum((value - mean - slope * (index - centre)) ** 2 for index, value in enumerate(window))
    error = math.sqrt(rest / (count - 2) / spread)
    change = abs(slope) * (count - 1)
    return change <= tolerance * mean or abs(slope) <= 2 * error


@lru_cache(maxsize=256)
def t_quantile(probability: float, freedom: int) -> float:
    """Return Student's t quantile for 0.5 <= probability < 1, to about 1e-10.

    Inverts the cumulative distribution 1 - I_x(freedom/2, 1/2) / 2 with x = freedom / (freedom + t^2)
    (Abramowitz and Stegun 26.7.1) by bisection.
    """
    low, high = 0.0, 1.0
    while _t_cumulative(high, freedom) < probability:
        low, high = high, high * 2
    while high - low > 1e-11 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cumulative(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _runs(worker: WorkerRun, name: str, other: str) -> bool:
    """Return whether a worker ran `name`; the control did run the baseline, unless the two are what is compared."""
    return worker.candidate == name or (worker.candidate == name + CONTROL_SUFFIX != other)


def _farthest(found: Ratio) -> float:
    return max(found.high, 1 / found.low) - 1 if found.low > 0 else math.inf


def _t_cumulative(t: float, freedom: int) -> float:
    return 1 - _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function by its continued fraction (Abramowitz and Stegun 26.5.8)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast below this point only (26.5.2)
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    value = 1.0
    for m in range(200, 0, -1):  # evaluated from its tail; 200 terms are far more than doubles can show
        odd = -(a + m - 1) * (a + b + m - 1) * x / ((a + 2 * m - 2) * (a + 2 * m - 1))
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        value = 1 + odd / (1 + even / value)
    return front / value
