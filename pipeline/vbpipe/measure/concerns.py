"""List what is wrong with a measurement, so that a reader need not trust it blindly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean

from vbpipe.measure.record import Concern, Measurement, ScenarioRun, WorkerRun
from vbpipe.measure.statistics import interval, noise_floor, ratio

_BUSY_CPUS = 0.15
_STEAL_SHARE = 0.01
_UNSTABLE_SHARE = 0.25
_TREND = 0.02
_SHORT_CALL_NS = 20_000


def find_concerns(measurement: Measurement) -> tuple[Concern, ...]:
    """Return every concern, the gravest kinds first; an empty tuple means that nothing speaks against the numbers."""
    checks = (_failures, _groups, _noise, _precision, _threads, _host, _warmups, _short_calls)
    return tuple(concern for check in checks for concern in check(measurement))


def _failures(measurement: Measurement) -> Iterator[Concern]:
    for outcome in measurement.outcomes:
        if outcome.status != "measured":
            yield Concern("not_measured", f"{outcome.candidate} {outcome.status}: {outcome.message}")


def _groups(measurement: Measurement) -> Iterator[Concern]:
    settings, groups = measurement.settings, measurement.groups
    if measurement.measured and len(groups) < settings.min_groups:
        needed_s = 1.1 * settings.min_groups * fmean(group.wall_s for group in groups)
        yield Concern(
            "too_few_groups",
            f"only {len(groups)} of at least {settings.min_groups} groups fit into {settings.budget_s:g} s; "
            f"about {math.ceil(needed_s)} s are needed.",
        )


def _noise(measurement: Measurement) -> Iterator[Concern]:
    if measurement.control is None:
        yield Concern("no_control", "the baseline was not measured against itself: the noise floor is unknown.")
        return
    if measurement.control not in measurement.measured or measurement.baseline not in measurement.measured:
        return
    for scenario in measurement.scenarios:
        same = ratio(measurement, measurement.control, measurement.baseline, scenario)
        floor = noise_floor(measurement, scenario)
        if floor == math.inf:
            continue  # from a single group, which is a concern of its own
        if not same.low <= 1 <= same.high and floor > measurement.settings.margin:
            yield Concern(
                "control_differs", f"{scenario}: the baseline differs from itself by {abs(same.value - 1):.1%}."
            )
        elif floor > measurement.settings.margin:
            yield Concern(
                "noise_above_margin",
                f"{scenario}: noise of {floor:.1%} is above the margin of {measurement.settings.margin:.1%}.",
            )


def _precision(measurement: Measurement) -> Iterator[Concern]:
    if measurement.baseline not in measurement.measured or len(measurement.groups) < 2:
        return
    wanted = measurement.settings.precision
    others = [name for name in measurement.measured if name not in (measurement.baseline, measurement.control)]
    widths = {
        f"{name} in {scenario}": min(ratio(measurement, name, measurement.baseline, scenario).half_width, 100.0)
        for name in others
        for scenario in measurement.scenarios
    }
    wide = {what: width for what, width in widths.items() if width > wanted}
    if wide:
        worst = max(wide, key=lambda what: wide[what])
        yield Concern(
            "imprecise",
            f"{len(wide)} of {len(widths)} ratios are wider than +-{wanted:.1%}, "
            f"at worst +-{wide[worst]:.1%} ({worst}); a larger budget narrows them.",
        )


def _threads(measurement: Measurement) -> Iterator[Concern]:
    allowed = measurement.settings.threads
    for name in measurement.measured:
        used = [run.cpus_used for worker in _workers(measurement, name) for run in worker.runs.values()]
        if used and fmean(used) > 1.15 * allowed + 0.05:
            yield Concern(
                "unequal_threads",
                f"{name} used {fmean(used):.1f} cores where {allowed} were allowed: not a fair ratio.",
            )
    for group in measurement.groups:
        masks = sorted({worker.affinity for worker in group.workers})
        if len(masks) > 1:
            yield Concern("unequal_affinity", f"workers of one group could use different cores: {masks}.")
            return


def _host(measurement: Measurement) -> Iterator[Concern]:
    groups, host = measurement.groups, measurement.host
    if not groups:
        return
    other_cpus, steal = fmean(group.other_cpus for group in groups), fmean(group.steal_share for group in groups)
    throttled = sum(group.throttled for group in groups)
    if other_cpus > _BUSY_CPUS:
        yield Concern("busy_host", f"other processes used {other_cpus:.1f} of {host.cores} cores during the blocks.")
    if steal > _STEAL_SHARE:
        yield Concern("steal", f"the hypervisor took {steal:.1%} of the processor time during the blocks.")
    if throttled:
        yield Concern("throttled", f"the cgroup's quota stopped us in {throttled} periods during the blocks.")
    if host.cpu_quota is not None and host.cpu_quota < measurement.settings.threads:
        yield Concern(
            "quota", f"the cgroup allows {host.cpu_quota:g} cores, fewer than {measurement.settings.threads} threads."
        )
    if measurement.settings.threads > len(measurement.settings.cpus or host.affinity):
        yield Concern("oversubscribed", f"{measurement.settings.threads} threads on {len(host.affinity)} cores.")


def _warmups(measurement: Measurement) -> Iterator[Concern]:
    unstable: list[str] = []
    unjudged = trending = 0
    for name in measurement.measured:
        for scenario in measurement.scenarios:
            runs = [worker.runs[scenario] for worker in _workers(measurement, name)]
            share = sum(run.warmup_stable is False for run in runs) / max(1, len(runs))
            if share >= _UNSTABLE_SHARE:
                unstable.append(f"{name} in {scenario} ({share:.0%} of workers)")
            unjudged += any(run.warmup_stable is None for run in runs)
            trending += _trends(runs)
    if unstable:
        named = ", ".join(unstable[:2]) + (f" and {len(unstable) - 2} more" if len(unstable) > 2 else "")
        yield Concern("warmup_not_stable", f"still drifting after warm-up: {named}.")
    if unjudged:
        yield Concern("warmup_short", f"the budget left too few warm-up calls to judge in {unjudged} cases.")
    if trending:
        yield Concern("still_warming", f"in {trending} cases the last block was clearly faster than the first.")


def _trends(runs: list[ScenarioRun]) -> bool:
    """Return whether the first block is slower than the last by more than 2 % beyond doubt."""
    drifts = [math.log(fmean(run.blocks_ns[0]) / fmean(run.blocks_ns[-1])) for run in runs if len(run.blocks_ns) > 1]
    centre, half = interval(drifts, 0.99)
    return centre - half > _TREND


def _short_calls(measurement: Measurement) -> Iterator[Concern]:
    for name in measurement.measured:
        blocks = [b for w in _workers(measurement, name) for run in w.runs.values() for b in run.blocks_ns]
        if blocks and min(min(block) for block in blocks) < _SHORT_CALL_NS:
            yield Concern("short_calls", f"{name} takes under 20 us a call: the clock itself shows in its times.")


def _workers(measurement: Measurement, name: str) -> list[WorkerRun]:
    return [worker for group in measurement.groups for worker in group.workers if worker.candidate == name]
