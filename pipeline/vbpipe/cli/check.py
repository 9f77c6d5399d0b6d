"""`vbpipe check`: name everything wrong with a recipe."""

from __future__ import annotations

from dataclasses import asdict

from vbpipe.cli.request import RecipeRequest
from vbpipe.cli.terminal import print_json, stdout
from vbpipe.errors import RecipeError


def check_recipe(request: RecipeRequest, *, as_json: bool) -> None:
    """Load the recipe and lay out its plan; raises RecipeError with every problem."""
    try:
        loaded, plan = request.open()
    except RecipeError as error:
        if as_json:
            print_json({"ok": False, "problems": [asdict(problem) for problem in error.problems]})
        raise
    if as_json:
        counts = {"variants": list(loaded.variants), "targets": list(plan.targets), "steps": len(plan.steps)}
        print_json({"ok": True, **counts})
        return
    variants, targets = len(loaded.variants), len(plan.targets)
    stdout().print(
        f"{request.recipe}: ok: {_count(variants, 'variant')}, {_count(targets, 'target')}, {len(plan.steps)} steps",
        markup=False,
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
