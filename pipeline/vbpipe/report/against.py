"""One report against another: each step's speed-up over eager here, there, and the quotient of the two."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vbpipe.decide import Figure, quotient
from vbpipe.errors import UsageError
from vbpipe.report.markdown import escape, table_lines
from vbpipe.report.stored import LAYOUT_ERRORS, differences, environment, read_ratio
from vbpipe.report.table import Cell, Grid

COLUMNS = ("step", "scenario", "here", "there", "here / there [95 % interval]")


@dataclass(frozen=True)
class Comparison:
    """What two reports say of the targets that both have.

    Args:
        grids: a table for each target.
        notes: what only one of the reports has, a sentence each.
        differs: how the hosts are unequal, a phrase for each target and fact; empty when they are equal.
    """

    grids: tuple[Grid, ...]
    notes: tuple[str, ...]
    differs: tuple[str, ...]

    @property
    def banner(self) -> str:
        """Return the line to print above everything else; empty when the hosts are equal."""
        if not self.differs:
            return ""
        return f"UNEQUAL HOSTS, so a quotient says as much of them as of the steps: {'; '.join(self.differs)}."


def compare_reports(here: Mapping[str, Any], there: Mapping[str, Any]) -> Comparison:
    """Return what comes of comparing `here` with `there`.

    The quotient's interval is that of two independent runs: on the log scale, the root of the sum of both squares.

    Raises:
        UsageError: they have no judged target in common, or one is not laid out as a report.
    """
    try:
        names = [report["recipe"]["name"] for report in (here, there)]
        if names[0] != names[1]:
            raise UsageError(
                f"the reports are of different recipes: {names[0]!r} here, {names[1]!r} there.",
                where="--against",
                hint="Compare builds of the same recipe.",
            )
        judged = [name for name, facts in here["targets"].items() if facts["verdict"] is not None]
        common = [name for name in judged if name in there["targets"] and there["targets"][name]["verdict"] is not None]
        if not common:
            raise UsageError(
                f"the reports have no judged target in common: {', '.join(here['targets'])} here, "
                f"{', '.join(there['targets'])} there.",
                where="--against",
                hint="Compare builds of the same recipe.",
            )
        notes = [f"judged only here: target {name}." for name in judged if name not in common]
        also = [name for name, facts in there["targets"].items() if facts["verdict"] is not None]
        notes += [f"judged only there: target {name}." for name in also if name not in common]
        for target in common:
            notes += _notes(here, there, target)
        return Comparison(
            grids=tuple(_grid(here, there, target) for target in common),
            notes=tuple(notes),
            differs=tuple(f"{target}: {text}" for target in common for text in _differs(here, there, target)),
        )
    except LAYOUT_ERRORS as error:
        raise UsageError(f"one of the files is not laid out as a report ({error!r}).", where="--against") from error


def against_markdown(found: Comparison, name: str) -> str:
    """Return the comparison as Markdown; `name` is the recipe's."""
    lines = [f"## vbpipe: {escape(name)}, against another report", ""]
    if found.banner:
        lines += [f"**{escape(found.banner)}**", ""]
    for grid in found.grids:
        lines += table_lines(grid)
    lines += [f"- {escape(note)}" for note in found.notes]
    return "\n".join(lines).rstrip() + "\n"


def _differs(here: Mapping[str, Any], there: Mapping[str, Any], target: str) -> tuple[str, ...]:
    return differences(environment(here, target), environment(there, target))


def _grid(here: Mapping[str, Any], there: Mapping[str, Any], target: str) -> Grid:
    ours, theirs = _ratios(here, target), _ratios(there, target)
    rows = tuple(
        (Cell(name), Cell(scenario), Cell(_shown(ratio)), Cell(_shown(other)), Cell(_shown(quotient(ratio, other))))
        for (name, scenario), ratio in ours.items()
        if (other := theirs.get((name, scenario))) is not None
    )
    return Grid(f"{here['recipe']['name']} on {target}: speed-up over eager, here and there", COLUMNS, rows)


def _notes(here: Mapping[str, Any], there: Mapping[str, Any], target: str) -> Iterator[str]:
    ours, theirs = _ratios(here, target), _ratios(there, target)
    for place, found, other in (("here", ours, theirs), ("there", theirs, ours)):
        for name, scenario in found:
            if (name, scenario) not in other:
                yield f"measured only {place}: {name} at {scenario} on {target}."


def _ratios(report: Mapping[str, Any], target: str) -> dict[tuple[str, str], Figure]:
    rows = report["targets"][target]["verdict"]["rows"]
    return {(name, s): read_ratio(ratio) for name, row in rows.items() for s, ratio in row["ratios"].items()}


def _shown(ratio: Figure) -> str:
    if not ratio.low or ratio.high is None or ratio.high == math.inf:
        return f"{ratio.value:.3f}x, no interval"
    return f"{ratio.value:.3f}x [{ratio.low:.3f}, {ratio.high:.3f}]"
