"""Measure candidates against each other: fresh processes per group, one timed at a time, in random order."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from vbpipe.errors import UsageError
from vbpipe.measure import facts
from vbpipe.measure.concerns import find_concerns
from vbpipe.measure.group import Bench, Progress, run_group
from vbpipe.measure.record import CONTROL_SUFFIX, Candidate, Group, Measurement, Outcome, Scenario, Settings
from vbpipe.measure.statistics import group_value, interval, precise, spent_level

_OVERRUN = 1.1  # of the budget, rather than one group too few
_SHRINK = 0.7  # of the shortest group so far: a later one can give up some of its blocks


def measure(
    candidates: Sequence[Candidate],
    scenarios: Sequence[Scenario],
    settings: Settings,
    *,
    baseline: str,
    expected: Mapping[str, Path] | None = None,
    progress: Progress = lambda _fraction, _message: None,
) -> Measurement:
    """Time candidates in every scenario, each against all others.

    The unit of replication is a group: one fresh worker process per candidate, warmed up, then timed in short blocks,
    one worker active at a time. A round visits all candidates in a random order and the next one in the reverse order
    (ABBA for two), so that drift cancels. A candidate that fails in any group is reported and never timed again.

    Args:
        candidates: what to time. Names are unique and don't end in "#aa", which is the baseline's second worker.
        scenarios: inputs; all candidates get the same bytes, loaded before anything is timed.
        settings: budgets and limits.
        baseline: name of the candidate whose ratios decide when to stop.
        expected: scenario name to a safetensors file of the right outputs. Checked before the first timed call, and
            again after the last. Without it, outputs only have to be finite.
        progress: called between blocks with the share done and a message; it must return fast.

    Raises:
        UsageError: the arguments contradict each other.
    """
    _check(candidates, scenarios, baseline, expected or {})
    begin = time.monotonic()
    control = baseline + CONTROL_SUFFIX if settings.control else None
    asked = list(candidates)
    if control is not None:
        asked.append(replace(next(one for one in candidates if one.name == baseline), name=control))
    failures: dict[str, Outcome] = {}
    groups: list[Group] = []
    usual_s: list[float] = []  # of groups in which nothing hung and nothing failed
    host = facts.host_facts()
    with TemporaryDirectory(prefix="vbpipe-measure-") as logs:
        bench = Bench(tuple(scenarios), expected or {}, settings, Path(logs), begin + settings.budget_s, progress)
        live = asked
        while not _done(bench, groups, usual_s, [one.name for one in live], baseline):
            group, failed = run_group(bench, live, groups)
            groups.append(group)
            usual_s += [] if failed else [group.wall_s]
            failures.update((outcome.candidate, outcome) for outcome in failed)
            live = [one for one in asked if one.name not in failures]
            bench = replace(bench, standing=_standing(groups, [one.name for one in live], baseline, bench))
    outcomes = tuple(failures.get(one.name, Outcome(one.name, "measured")) for one in asked)
    names = tuple(scenario.name for scenario in scenarios)
    elapsed_s = time.monotonic() - begin
    found = Measurement(baseline, control, names, settings, host, elapsed_s, tuple(groups), outcomes)
    return replace(found, problems=find_concerns(found))


def _check(
    candidates: Sequence[Candidate], scenarios: Sequence[Scenario], baseline: str, expected: Mapping[str, Path]
) -> None:
    names = [candidate.name for candidate in candidates]
    titles = [scenario.name for scenario in scenarios]
    for kind, given in (("candidate", names), ("scenario", titles)):
        if not given or len(set(given)) < len(given):
            raise UsageError(f"there must be at least one {kind}, and no two of one name: {given}.", where="measure")
    if baseline not in names:
        raise UsageError(f"the baseline {baseline!r} is not a candidate: {names}.", where="measure")
    if any(name.endswith(CONTROL_SUFFIX) for name in names):
        raise UsageError(f"a candidate's name can't end in {CONTROL_SUFFIX!r}.", where="measure")
    if set(expected) - set(titles):
        raise UsageError(
            f"expected outputs for unknown scenarios {sorted(set(expected) - set(titles))}.", where="measure"
        )


def _done(bench: Bench, groups: Sequence[Group], usual_s: Sequence[float], live: Sequence[str], baseline: str) -> bool:
    """Return whether to stop: nothing left to time, precise enough, or no time for one more group."""
    settings, done = bench.settings, len(groups)
    if not live or done >= settings.max_groups:
        return True
    if not groups:
        return False
    left_s = bench.deadline - time.monotonic()
    if not usual_s:
        return left_s <= 0
    shortest_s = min(usual_s)
    if done < settings.min_groups:
        missing_s = (settings.min_groups - done) * shortest_s * _SHRINK
        reachable = missing_s <= left_s + (_OVERRUN - 1) * settings.budget_s
        return not reachable and left_s < shortest_s
    return left_s < shortest_s or _precise(groups, live, baseline, bench)


def _precise(groups: Sequence[Group], live: Sequence[str], baseline: str, bench: Bench) -> bool:
    ratios = _log_ratios(groups, live, baseline, bench)
    return all(precise(values, bench.settings) for values in ratios.values())


def _standing(groups: Sequence[Group], live: Sequence[str], baseline: str, bench: Bench) -> str:
    """Return the least certain ratio to the baseline so far: the one whose interval still has to narrow."""
    ratios = _log_ratios(groups, [name for name in live if not name.endswith(CONTROL_SUFFIX)], baseline, bench)
    found = {pair: interval(values, spent_level(bench.settings)) for pair, values in ratios.items()}
    if not found or len(groups) < 2:
        return ""
    (name, scenario), (centre, half) = max(found.items(), key=lambda item: item[1][1])
    where = f" in {scenario}" if len(bench.scenarios) > 1 else ""
    return f"{name} {math.exp(centre):.3f}x +-{math.expm1(min(half, 5.0)):.1%}{where}, "


def _log_ratios(
    groups: Sequence[Group], live: Sequence[str], baseline: str, bench: Bench
) -> dict[tuple[str, str], list[float]]:
    """Return (candidate, scenario) to a log-ratio to the baseline per group; empty once the baseline has failed."""
    pairs = [(name, scenario.name) for name in live if name != baseline for scenario in bench.scenarios]
    found = {
        pair: [group_value(group, pair[0], baseline, pair[1]) for group in groups]
        for pair in (pairs if baseline in live else ())
    }
    return {pair: [value for value in values if value is not None] for pair, values in found.items()}
