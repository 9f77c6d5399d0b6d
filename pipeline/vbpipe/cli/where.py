"""`vbpipe where`: what became of a module in every step of a build."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vbpipe.cli.plan import forecast
from vbpipe.cli.progress import title
from vbpipe.cli.request import RecipeRequest
from vbpipe.cli.terminal import print_grid, print_json, stdout
from vbpipe.core import Traceable, TracedNode
from vbpipe.errors import UsageError
from vbpipe.recipe.wording import suggest
from vbpipe.report.table import Cell, Grid, Tone
from vbpipe.runner import configured
from vbpipe.store import Store


@dataclass(frozen=True)
class Traces:
    """A step that is in the store, and the nodes of its graph or engine."""

    step: str
    nodes: tuple[TracedNode, ...]

    def of(self, module: str) -> tuple[TracedNode, ...]:
        """Return the nodes that compute a part of the module or of one inside it."""
        return tuple(node for node in self.nodes if any(within(part, module) for part in node.modules))


def find_module(request: RecipeRequest, module: str, store: Path, *, as_json: bool) -> None:
    """Print for each step in the store which nodes compute the module, and what else these compute.

    Raises:
        UsageError: nothing of the recipe is in the store, or no node computes such a module.
    """
    found = traces(request, store)
    parts = sorted({part for one in found for node in one.nodes for part in node.modules if part})
    if not any(within(part, module) for part in parts):
        raise UsageError(
            f"no node of any step computes {module!r}.{suggest(module, _with_parents(parts))}",
            where=str(request.recipe),
            hint="Paths are those of named_modules().",
        )
    if as_json:
        print_json({one.step: [asdict(node) for node in one.of(module)] for one in found})
        return
    rows = tuple(_row(one, module) for one in found)
    print_grid(stdout(), Grid(f"{module}: what computes it", ("step", "nodes", "shared with"), rows))


def traces(request: RecipeRequest, store: Path) -> tuple[Traces, ...]:
    """Return every step that is in the store and whose nodes can be traced, in the plan's order.

    Raises:
        UsageError: there is none.
    """
    loaded, plan = request.open()
    opened = Store(store.absolute())
    found = []
    for one in forecast(plan, opened, loaded.root):
        runner = one.step.runner
        if one.digest is None or one.state != "hit" or runner is None:
            continue
        backend = configured(runner)
        if isinstance(backend, Traceable):
            found.append(Traces(title(one.step), backend.nodes(opened.layout.object(one.digest))))
    if not found:
        raise UsageError(
            "no step that could be traced is in the store.", where=str(request.recipe), hint="Build it first."
        )
    return tuple(found)


def within(part: str, module: str) -> bool:
    """Return whether `part` is the module or lies inside it."""
    return part == module or part.startswith(f"{module}.")


def _row(one: Traces, module: str) -> tuple[Cell, ...]:
    nodes = one.of(module)
    counts = Counter(node.operator.rpartition(":")[2] for node in nodes)  # domains would push columns off the line
    operators = ", ".join(f"{name} {count}" if count > 1 else name for name, count in sorted(counts.items()))
    others = sorted({part for node in nodes for part in node.modules if part and not within(part, module)})
    tone: Tone = "plain" if nodes else "doubtful"
    told = f"{len(nodes)}: {operators}" if nodes else "nothing is left of it"
    return Cell(one.step), Cell(told, tone), _some(others)


def _some(names: Sequence[str]) -> Cell:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return Cell("".join(names[:1]) + more, "faint")


def _with_parents(parts: Sequence[str]) -> list[str]:
    found: dict[str, None] = {}
    for part in parts:
        names = part.split(".")
        found.update(dict.fromkeys(".".join(names[: end + 1]) for end in range(len(names))))
    return list(found)
