"""Check a stored report that a gate compares with, as far as a recipe alone can tell what the gate will need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vbpipe.errors import Problem, UsageError
from vbpipe.recipe.document import Node, child, entries, locate, quote
from vbpipe.recipe.names import gate_scenarios
from vbpipe.recipe.wording import suggest

if TYPE_CHECKING:
    from vbpipe.decide import Stored


def check_stored(node: Node, path: Path, gate: Node, root: Node) -> Iterator[Problem]:
    """Yield what keeps a report from being compared with.

    A build may leave targets out, so one that this report lacks counts only where it has none of the recipe's. The
    names of steps come from the plan: only a row that the gate names is looked for.

    Args:
        node: the report's name in the recipe.
        path: the file, which exists.
        gate: the gate that names it.
        root: the whole recipe.
    """
    # Only recipes with such a gate pay for the import.
    from vbpipe.report.stored import stored_target

    name = child(root, "name")
    recipe = name.value if name is not None and isinstance(name.value, str) else None
    found: list[Stored] = []
    refused: list[UsageError] = []
    for target in entries(child(root, "targets")):
        try:
            found.append(stored_target(path, target, {}, recipe=recipe))
        except UsageError as error:
            refused.append(error)
    if refused and not found:
        yield node.place.problem(f"{quote(node.value)} can't be compared with: {refused[0].what} {refused[0].hint}")
    for stored in found:
        yield from _lacking(node, stored, gate, root)


def _lacking(node: Node, stored: Stored, gate: Node, root: Node) -> Iterator[Problem]:
    from vbpipe.report.stored import lacking

    metric, row = child(gate, "metric"), locate(gate, "over", "row")
    scenarios = gate_scenarios(gate, root) if metric is not None and metric.value == "speedup" else ()
    if row is not None and isinstance(row.value, str):
        wrong = lacking(stored, row.value, scenarios)
        if wrong:
            near = "" if row.value in stored.rows else suggest(row.value, stored.rows)
            yield row.place.problem(f"{quote(node.value)}: {wrong}{near}")
        return
    for scenario in scenarios:
        if scenario not in stored.noise:
            there = ", ".join(stored.noise) or "none"
            yield node.place.problem(f"{quote(node.value)} has no scenario {quote(scenario)}; it has {there}.")
