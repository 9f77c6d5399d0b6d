"""`vbpipe plan`: the steps, hit or miss, and the part of the key that changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from vbpipe.cli.progress import title
from vbpipe.cli.request import RecipeRequest
from vbpipe.cli.terminal import print_grid, print_json, print_table, stdout, styled
from vbpipe.core import LayerChoice, Layered, cache_key
from vbpipe.errors import UsageError, VbpipeError
from vbpipe.plan import Plan, Step
from vbpipe.recipe.load import LoadedRecipe
from vbpipe.report.table import Cell, Grid, Tone
from vbpipe.store import Entry, Store


@dataclass(frozen=True)
class Forecast:
    """What a build would do with a step."""

    step: Step
    state: str
    """"hit", "miss" or "waits" (its inputs are not made yet, so its key is not known)."""
    why: str
    digest: str | None = None


_TONES: Mapping[str, Tone] = {"hit": "good", "miss": "doubtful", "waits": "faint"}


def show_plan(request: RecipeRequest, store: Path, *, as_json: bool) -> None:
    """Print every step with its forecast, and what can't be built on this host."""
    loaded, plan = request.open()
    forecasts = forecast(plan, Store(store.absolute()), loaded.root)
    if as_json:
        steps = [_as_json(f) for f in forecasts]
        told = {"unavailable": unavailable(plan), "pending": dict(plan.pending)}
        print_json({"recipe": loaded.name, "steps": steps, **told})
        return
    console = stdout()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("step", "state", "why"):
        table.add_column(column)
    for found in forecasts:
        tone = _TONES[found.state]
        table.add_row(styled(Cell(title(found.step))), styled(Cell(found.state, tone)), styled(Cell(found.why)))
    print_table(console, table)
    for target, reason in unavailable(plan).items():
        console.print(styled(Cell(f"{target}: can't be built here: {reason}", "bad")))
    for target, lacking in plan.pending.items():
        text = f"{target}: engines are built here; to run and measure them needs {lacking}"
        console.print(styled(Cell(text, "doubtful")))
    hits = sum(found.state == "hit" for found in forecasts)
    console.print(f"{hits} of {len(forecasts)} steps are in the store.")


def show_layers(request: RecipeRequest, *, as_json: bool) -> None:
    """Print for every step that treats modules apart what it would do to each; builds the models, runs nothing.

    Raises:
        UsageError: no step of the recipe treats modules apart.
        VbpipeError: a model can't be built, or a rule meets none of its modules.
    """
    loaded, plan = request.open()
    told = {title(step): _layers(step, loaded) for step in plan.steps.values() if isinstance(step.stage, Layered)}
    if not told:
        raise UsageError("no step of it treats modules apart.", where=str(request.recipe), hint="Add stages.quantize.")
    if as_json:
        print_json({name: [asdict(choice) for choice in choices] for name, choices in told.items()})
        return
    for name, choices in told.items():
        rows = tuple(
            (
                Cell(choice.module),
                Cell(choice.kind),
                Cell(choice.gets, "faint" if choice.gets == "float" else "plain"),
                Cell(choice.rule),
                Cell(choice.note, "bad" if choice.note.startswith("refused") else "doubtful"),
            )
            for choice in choices
        )
        print_grid(stdout(), Grid(name, ("module", "class", "gets", "by", ""), rows))


def _layers(step: Step, loaded: LoadedRecipe) -> tuple[LayerChoice, ...]:
    assert isinstance(step.stage, Layered), "only those are asked"
    variant = step.identities[0].split("/")[1]
    return step.stage.layers(loaded.variants[variant].model, loaded.root)


def forecast(plan: Plan, store: Store, root: Path) -> list[Forecast]:
    """Return what a build would do with each step, in the plan's order; runs nothing, writes nothing."""
    entries = store.entries()
    found: dict[str, Forecast] = {}
    for step_id, step in plan.steps.items():
        waits = [plan.steps[i].label for i in step.needs.values() if found[i].digest is None]
        found[step_id] = (
            Forecast(step, "waits", f"after {waits[0]}") if waits else _look(step, found, store, root, entries)
        )
    return list(found.values())


def unavailable(plan: Plan) -> dict[str, str]:
    """Return target to the reason why its backend can't be used here."""
    from vbpipe.runner import configured, engine_runner

    found: dict[str, str] = {}
    for name, target in plan.targets.items():
        reason = configured(engine_runner(target)).unavailable()
        if reason is not None:
            found[name] = reason
    return found


def _look(step: Step, found: Mapping[str, Forecast], store: Store, root: Path, entries: tuple[Entry, ...]) -> Forecast:
    try:
        key = cache_key(step.stage, {name: found[i].digest or "" for name, i in step.needs.items()}, root)
    except VbpipeError as error:
        return Forecast(step, "miss", str(error))
    entry = store.peek(key)
    if entry is not None:
        return Forecast(step, "hit", "", entry.digest)
    # A shared step is known by many names; whichever was built before tells what changed.
    explained = [store.explain(key, i, among=entries, hashed=False) for i in step.identities]
    best = next((e for e in explained if e.state != "never built"), explained[0])
    return Forecast(step, "miss", str(best))


def _as_json(found: Forecast) -> dict[str, Any]:
    return {
        "step": found.step.label,
        "identities": list(found.step.identities),
        "state": found.state,
        "why": found.why,
        "digest": found.digest,
    }
