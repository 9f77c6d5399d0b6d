"""Change a recipe's tree by dotted paths: a variant's overrides, and `--set` on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vbpipe.errors import Problem, RecipeError
from vbpipe.recipe.document import MAX_KEY_CHARS, Node, Place, Steps, child, entries, parse, quote
from vbpipe.recipe.model import Recipe
from vbpipe.recipe.wording import listing, suggest

COMMAND_LINE = "--set"

VARIABLE = ("data", "model", "stages")
"""What a variant may change. `recipe`, `name` and `variants` say what a variant is. Variants are compared with each
other on one target, by the same gates, and shipped the same way: `targets`, `gates` and `ship` hold for all of them."""


@dataclass(frozen=True)
class Setting:
    """One `--set path=value`."""

    path: str
    value: Node


def settings(texts: Sequence[str]) -> tuple[Setting, ...]:
    """Read `--set` arguments, `a.b.c=value` with a YAML value; an empty value or null removes.

    Raises:
        RecipeError: every argument that can't be read.
    """
    found: list[Setting] = []
    problems: list[Problem] = []
    for text in texts:
        path, equals, value = text.partition("=")
        steps = tuple(path.split("."))
        place = Place(COMMAND_LINE, 0, 0, steps)
        if not equals or not all(steps) or len(path) > MAX_KEY_CHARS:
            problems.append(Problem(COMMAND_LINE, 0, 0, "", f"{quote(text)} is not of the form a.b.c=value."))
            continue
        try:
            document = parse((value.strip() or "null").encode("utf-8", "surrogateescape"), COMMAND_LINE)
        except RecipeError as error:
            problems += [replace(problem, line=0, column=0, path=path) for problem in error.problems]
            continue
        problems += [replace(problem, line=0, column=0, path=path) for problem in document.problems]
        found.append(Setting(path, _moved(document.root, place)))
    if problems:
        raise RecipeError(problems)
    return tuple(found)


def apply_settings(root: Node, wanted: Sequence[Setting]) -> tuple[Node, list[Problem]]:
    """Return the tree with every setting applied, and what could not be."""
    problems: list[Problem] = []
    for setting in wanted:
        root, found = _set(root, setting.path, setting.value)
        problems += found
    return root, problems


def apply_variant(root: Node, changes: Node) -> tuple[Node, list[Problem]]:
    """Return the tree with a variant's changes applied, and what could not be.

    A dotted key replaces what is at that path; a key without dots merges a mapping into what is there; null removes.
    """
    problems: list[Problem] = []
    for key, value in entries(changes).items():
        top = key.split(".", 1)[0]
        if top not in VARIABLE:
            meant = "" if top in Recipe.model_fields else suggest(top, VARIABLE)
            known = f"{meant}{listing('It can change', VARIABLE)}"
            problems.append(value.place.problem(f"a variant can't change {quote(top)}.{known}"))
        elif "." not in key and isinstance(value.value, Mapping):
            there = child(root, key) or Node(value.place, {})
            root = _with(root, key, _merged(there, value))
        else:
            root, found = _set(root, key, value)
            problems += found
    return root, problems


def _moved(node: Node, place: Place) -> Node:
    """Return the node as if written at `place`; the text of a command line has no lines worth naming."""
    if isinstance(node.value, Mapping):
        children = node.value.items()
        return Node(place, {key: _moved(c, replace(place, steps=(*place.steps, key))) for key, c in children})
    if isinstance(node.value, tuple):
        items = enumerate(node.value)
        return Node(place, tuple(_moved(item, replace(place, steps=(*place.steps, i))) for i, item in items))
    return Node(place, node.value)


def _set(root: Node, path: str, value: Node) -> tuple[Node, list[Problem]]:
    steps, missing = _resolve(root, path)
    if value.value is None and missing:
        there = entries(_at(root, steps[: len(steps) - missing]))
        name = str(steps[len(steps) - missing])
        return root, [
            value.place.problem(f"there is no {quote(name)} to remove.{suggest(name, there)}{listing('Keys', there)}")
        ]
    holder = _at(root, steps[: len(steps) - max(missing, 1)])
    if not isinstance(holder.value, Mapping) and missing:
        return root, [value.place.problem(f"{quote(path)} leads through something that isn't a mapping.")]
    return _replaced(root, steps, value), []


def _resolve(root: Node, path: str) -> tuple[Steps, int]:
    """Return the steps that a dotted path means, and how many of them lead to nothing yet.

    Names may hold dots (`state.h` is an input), so of the keys that exist the longest that fits is taken.
    """
    parts = path.split(".")
    steps: list[str | int] = []
    node = root
    while parts:
        if isinstance(node.value, tuple) and parts[0].isdecimal():
            step: str | int = int(parts[0])
            used = 1
        else:
            fits = (n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in entries(node))
            used = next(fits, 1)
            step = ".".join(parts[:used])
        below = child(node, step)
        if below is None:
            break
        steps.append(step)
        node, parts = below, parts[used:]
    return (*steps, *parts), len(parts)


def _at(root: Node, steps: Steps) -> Node:
    for step in steps:
        below = child(root, step)
        assert below is not None, "_resolve says which steps exist"
        root = below
    return root


def _replaced(node: Node, steps: Steps, value: Node) -> Node:
    """Return the node with `value` at `steps`, or without that entry where `value` is null."""
    step, further = steps[0], steps[1:]
    if not further:
        return _without(node, step) if value.value is None else _with(node, step, value)
    below = child(node, step) or Node(value.place, {})
    return _with(node, step, _replaced(below, further, value))


def _with(node: Node, step: str | int, value: Node) -> Node:
    if isinstance(node.value, tuple):
        return Node(node.place, tuple(value if index == step else item for index, item in enumerate(node.value)))
    return Node(node.place, {**entries(node), str(step): value})


def _without(node: Node, step: str | int) -> Node:
    if isinstance(node.value, tuple):
        return Node(node.place, tuple(item for index, item in enumerate(node.value) if index != step))
    return Node(node.place, {key: value for key, value in entries(node).items() if key != step})


def _merged(there: Node, change: Node) -> Node:
    """Return `there` with the mapping `change` merged in (RFC 7396: null removes, what isn't a mapping replaces)."""
    kept = dict(entries(there))
    for key, value in entries(change).items():
        if value.value is None:
            kept.pop(key, None)
        elif isinstance(value.value, Mapping):
            kept[key] = _merged(kept.get(key, Node(value.place, {})), value)
        else:
            kept[key] = value
    return Node(there.place if isinstance(there.value, Mapping) else change.place, kept)
