"""What the commands that read a recipe have in common."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vbpipe.plan import Plan, make_plan
from vbpipe.recipe.load import LoadedRecipe, load


@dataclass(frozen=True)
class RecipeRequest:
    """A recipe and what the command line changes or leaves out of it."""

    recipe: Path
    sets: tuple[str, ...] = ()
    allow_outside: bool = False
    variants: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()

    def open(self) -> tuple[LoadedRecipe, Plan]:
        """Load the recipe and lay out its plan.

        Raises:
            RecipeError: with everything that is wrong with it.
            UsageError: there is no such file, variant or target.
        """
        loaded = load(self.recipe, overrides=self.sets, allow_outside=self.allow_outside)
        return loaded, make_plan(loaded.name, loaded.variants, only_variants=self.variants, only_targets=self.targets)
