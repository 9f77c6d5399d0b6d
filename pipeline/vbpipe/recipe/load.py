"""Load a recipe: every variant as checked, immutable values, or every problem at once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vbpipe.errors import Problem, RecipeError, UsageError
from vbpipe.recipe.document import MAX_BYTES, Node, Place, child, entries, parse, plain, quote
from vbpipe.recipe.files import SourceFiles
from vbpipe.recipe.model import Recipe, Target
from vbpipe.recipe.names import check_names
from vbpipe.recipe.options import check_shared_stages, check_stages, check_targets, gather_backend_options
from vbpipe.recipe.overrides import COMMAND_LINE, Setting, apply_settings, apply_variant, settings
from vbpipe.recipe.wording import check, suggest

VERSION = 1


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe without problems."""

    path: Path
    root: Path
    """Its folder, resolved: `factory`, `data` and `files` are below it."""
    digest: str
    """sha256 (hex) of the file's bytes."""
    variants: Mapping[str, Recipe]
    """In the recipe's order, the reference first; each with its changes and `--set` applied."""
    targets: Mapping[str, Target]
    """The same for every variant."""

    @property
    def name(self) -> str:
        """Return the recipe's name, which no variant changes."""
        return next(iter(self.variants.values())).name


def load(path: Path, *, overrides: Sequence[str] = (), allow_outside: bool = False) -> LoadedRecipe:
    """Read and check a recipe, without importing its code or any vendor SDK.

    Args:
        path: the YAML file.
        overrides: `--set` arguments, "stages.fuse.level=basic"; they win over the file and over every variant.
        allow_outside: whether files that the recipe names may lie outside its folder.

    Raises:
        RecipeError: with every problem found, in the order of the file.
        UsageError: there is no such file, or it can't be read.
    """
    text = _read(path)
    wanted = settings(overrides)
    document = parse(text, str(path))
    found = [*document.problems]
    base, problems = apply_settings(document.root, wanted)
    found += problems
    _refuse_other_versions(base, found, str(path))
    variants, problems = _variants(base, wanted, SourceFiles(path.parent, allow_outside))
    # What a refused value leads to is not a second mistake.
    refused = {(problem.line, problem.column, problem.path) for problem in document.problems}
    found += [problem for problem in problems if (problem.line, problem.column, problem.path) not in refused]
    if found:
        raise RecipeError(_in_order(found, str(path)))
    targets = next(iter(variants.values())).targets
    return LoadedRecipe(path, path.parent.resolve(), hashlib.sha256(text).hexdigest(), variants, targets)


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():
            there = [other.name for other in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
            what = "this is a folder, not a recipe." if path.is_dir() else "there is no such file."
            raise UsageError(
                what, where=str(path), hint=suggest(path.name, there).strip() or "Name a recipe's YAML file."
            )
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"it can't be read: {error}.", where=quote(str(path), marks="")) from error


def _refuse_other_versions(base: Node, found: list[Problem], file: str) -> None:
    """Stop at a file that other rules apply to: checking it by ours would only mislead."""
    version = child(base, "recipe")
    if not isinstance(base.value, Mapping):
        found.append(base.place.problem(f"a recipe is a mapping, not {quote(plain(base))}."))
    elif version is None:
        message = f"'recipe' is missing here: the version of the format. Begin with 'recipe: {VERSION}'."
        found.append(Place(file, 1, 1, ()).problem(message, "recipe"))
    elif isinstance(version.value, bool) or version.value != VERSION or not isinstance(version.value, int):
        shown = f"{quote(plain(version))} in quotes" if version.value == str(VERSION) else quote(plain(version))
        message = f"this vbpipe understands recipe version {VERSION}, not {shown}."
        found.append(version.place.problem(message))
    else:
        return
    raise RecipeError(_in_order(found, file))


def _variants(base: Node, wanted: Sequence[Setting], files: SourceFiles) -> tuple[dict[str, Recipe], list[Problem]]:
    """Return every variant that has no problem, and the problems of the others."""
    made: dict[str, Recipe] = {}
    found: dict[str, list[Problem]] = {}
    names = entries(child(base, "variants")) or {"standard": Node(base.place, {})}
    for name, changes in names.items():
        tree, problems = apply_variant(base, changes)
        problems += check_shared_stages(changes)
        # Once more, because what is typed now wins over what a variant says. Not removals: the second would take what
        # has moved up in a list.
        own = [s for s in wanted if not s.path.startswith("variants.") and s.value.value is not None]
        tree, further = apply_settings(tree, own)
        tree, twice = gather_backend_options(tree)
        recipe, wrong = check(Recipe, tree)
        problems += [*further, *twice, *wrong, *check_targets(tree), *check_stages(tree)]
        problems += [*check_names(tree), *files.check(tree)]
        found[name] = problems
        if recipe is not None:
            made[name] = recipe
    return made, _merged(found)


def _merged(found: Mapping[str, Iterable[Problem]]) -> list[Problem]:
    """Return each problem once; one that only some variants have, in a line that all share, names them."""
    users: dict[Problem, list[str]] = {}
    for variant, problems in found.items():
        for problem in dict.fromkeys(problems):
            users.setdefault(problem, []).append(variant)
    merged: list[Problem] = []
    for problem, variants in users.items():
        shared = len(variants) == len(found) or problem.path.startswith("variants.")
        which = "" if shared else f" (In variant {', '.join(variants)}.)"
        merged.append(Problem(problem.file, problem.line, problem.column, problem.path, problem.message + which))
    return merged


def _in_order(problems: Iterable[Problem], file: str) -> list[Problem]:
    """Return the recipe's own problems by line, then those of `--set`, then those of other files."""
    rank = {file: 0, COMMAND_LINE: 1}
    return sorted(dict.fromkeys(problems), key=lambda p: (rank.get(p.file, 2), p.file, p.line, p.column))
