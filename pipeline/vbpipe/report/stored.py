"""What an earlier report says of a target, in the figures that gates judge, and how unequal two hosts are."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from vbpipe.decide import BASELINE, LEVEL, Figure, Row, Stored
from vbpipe.errors import UsageError
from vbpipe.measure.statistics import t_quantile
from vbpipe.report.document import read_report

ENVIRONMENT = ("processor", "flags", "cores", "quota", "threads")
"""Facts that must be equal for speeds to be compared. The kernel's version is none: it changes with every update."""

LARGEST = 1e9
"""What a report holds in place of infinity."""

LAYOUT_ERRORS = (KeyError, TypeError, ValueError, AttributeError)
"""What reading a report raises that is laid out in another way."""


def environment(report: Mapping[str, Any], target: str) -> dict[str, str]:
    """Return the facts of the host that a target was measured on, as short strings."""
    facts = report["targets"][target]
    return {**facts["verdict"]["host"], "threads": str(facts["threads"])}


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> tuple[str, ...]:
    """Return what makes two environments unequal, a phrase each: "cores: 2 of 2 here, 8 of 8 there"."""
    return tuple(
        f"{name}: {here.get(name) or 'unknown'} here, {there.get(name) or 'unknown'} there"
        for name in ENVIRONMENT
        if here.get(name) != there.get(name)
    )


def stored_target(
    path: Path, target: str, here: Mapping[str, str], level: float = LEVEL, recipe: str | None = None
) -> Stored:
    """Read what a report says of a target.

    Args:
        path: the report.json.
        target: its name, there and here.
        here: the environment that it is compared with.
        level: confidence that its intervals shall have; they are written with LEVEL.
        recipe: the name that its recipe must have; None for any.

    Raises:
        UsageError: the file can't be read, is no report of this version, or has no verdict on such a target.
    """
    report = read_report(path)
    try:
        if recipe not in (None, report["recipe"]["name"]):
            raise UsageError(
                f"it is of recipe {report['recipe']['name']!r}, not of {recipe!r}.", where=str(path), hint=_RENEW
            )
        if target not in report["targets"]:
            there = ", ".join(sorted(report["targets"])) or "none"
            raise UsageError(f"it has no target {target!r}; it has {there}.", where=str(path), hint=_RENEW)
        verdict = report["targets"][target]["verdict"]
        if verdict is None:
            raise UsageError(f"nothing was judged on target {target!r} in it.", where=str(path), hint=_RENEW)
        rows = {name: _row(name, facts, level) for name, facts in verdict["rows"].items()}
        noise = {scenario: _unbounded(value) for scenario, value in verdict["noise_floor"].items()}
        return Stored(rows, noise, "; ".join(differences(here, environment(report, target))))
    except LAYOUT_ERRORS as error:
        raise UsageError(f"it is not laid out as a report ({error!r}).", where=str(path), hint=_RENEW) from error


def read_ratio(ratio: Mapping[str, Any], level: float = LEVEL) -> Figure:
    """Return a ratio with its interval widened from LEVEL to `level`.

    The width of a t interval is its quantile times what the groups scattered, so the quantiles' ratio is all it takes:
    a little too much where the interval allows for when the run stopped. Without a finite one, it is 0 to infinity.
    """
    value, low, high = float(ratio["value"]), float(ratio["low"]), _unbounded(ratio["high"])
    freedom = int(ratio["groups"]) - 1
    if value <= 0:
        raise ValueError(f"a ratio of {value}")
    if low <= 0 or high == math.inf or freedom < 1:
        return Figure(value, 0.0, math.inf)
    wider = t_quantile(0.5 + level / 2, freedom) / t_quantile(0.5 + LEVEL / 2, freedom)
    if wider * math.log(high / low) > _UNBOUNDED:
        return Figure(value, 0.0, math.inf)
    return Figure(value, value * (low / value) ** wider, value * (high / value) ** wider)


def lacking(stored: Stored, row: str, scenarios: Collection[str]) -> str:
    """Return what a stored report lacks for a comparison with `row` in these scenarios: a sentence, "" for nothing."""
    if row not in stored.rows:
        return f"it has no step {row!r}; it has {', '.join(stored.rows)}."
    if scenarios and row == BASELINE:
        return f"{BASELINE} is what both builds are compared with; name another step as its row."
    missing = [scenario for scenario in scenarios if scenario not in stored.rows[row].speedups]
    there = ", ".join(stored.rows[row].speedups) or "none"
    return f"it has no speed-up of {row!r} at {missing[0]}; it has {there}." if missing else ""


_UNBOUNDED = 100.0
"""On the log scale: an interval so wide says nothing, and its ends are no numbers that a machine can hold."""

_RENEW = "Build with the recipe that it is to be compared with, and keep that report.json."


def _row(name: str, facts: Mapping[str, Any], level: float) -> Row:
    speedups = {scenario: read_ratio(ratio, level) for scenario, ratio in facts["ratios"].items()}
    return Row(name, speedups, {key: _figure(figure) for key, figure in facts["metrics"].items()})


def _figure(facts: Mapping[str, Any]) -> Figure:
    low, high = facts.get("low"), facts.get("high")
    return Figure(
        float(facts["value"]), None if low is None else float(low), None if high is None else _unbounded(high)
    )


def _unbounded(value: float) -> float:
    return math.inf if float(value) >= LARGEST else float(value)
