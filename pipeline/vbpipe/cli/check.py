"""`vbpipe check`: name everything wrong with a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from vbpipe.cli.terminal import print_json, stdout
from vbpipe.errors import RecipeError
from vbpipe.plan import make_plan
from vbpipe.recipe.load import load


def check_recipe(recipe: Path, sets: Sequence[str], *, as_json: bool) -> None:
    """Load the recipe and lay out its plan; raises RecipeError with every problem."""
    try:
        loaded = load(recipe, overrides=sets)
        plan = make_plan(loaded.name, loaded.variants)
    except RecipeError as error:
        if as_json:
            print_json({"ok": False, "problems": [asdict(problem) for problem in error.problems]})
        raise
    if as_json:
        print_json({"ok": True, "variants": list(loaded.variants), "targets": list(plan.targets), "steps": len(plan.steps)})
        return
    variants, targets = len(loaded.variants), len(plan.targets)
    stdout().print(f"{recipe}: ok: {variants} variants, {targets} targets, {len(plan.steps)} steps", markup=False)
