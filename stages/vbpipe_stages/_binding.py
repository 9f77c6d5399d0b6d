"""Turn a recipe's flat input names into the arguments that forward() takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, Union

from vbpipe.errors import VbpipeError

Tree = Union[int, "list[Tree]", "dict[str, Tree]"]
"""How one argument is built from the flat inputs; a leaf is the position of its tensor."""


@dataclass(frozen=True)
class Arguments:
    """The call of forward(), with tensor positions in place of tensors."""

    args: tuple[Tree, ...]
    kwargs: Mapping[str, Tree]

    def fill(self, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and keyword arguments that hold `tensors`."""
        return (
            [_fill(tree, tensors) for tree in self.args],
            {name: _fill(tree, tensors) for name, tree in self.kwargs.items()},
        )


def bind(names: Sequence[str], forward: Callable[..., Any]) -> Arguments:
    """Return how inputs called `names` reach `forward`.

    An input goes to the parameter that has its name, else to the next free position. Dots nest.

    Raises:
        VbpipeError: names that can't nest, more inputs than forward() takes, or a required parameter left out.
    """
    trees = nest(names)
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):  # a compiled method has none: positions are all there is
        return Arguments(tuple(trees.values()), {})
    parameters = {p.name: p for p in signature.parameters.values()}
    given = _assign(trees, parameters)
    _complete(given, parameters)
    bound = inspect.BoundArguments(signature, {name: given[name] for name in parameters if name in given})
    return Arguments(bound.args, bound.kwargs)


def nest(names: Sequence[str]) -> dict[str, Tree]:
    """Return `state.h`, `state.c`, `past.0` as {"state": {"h": 0, "c": 1}, "past": [2]}."""
    top: dict[str, Any] = {}
    for position, name in enumerate(names):
        *folders, leaf = name.split(".")
        place = top
        for folder in folders:
            place = place.setdefault(folder, {})
            if not isinstance(place, dict):
                raise _error(f"input {name!r} lies inside another input.")
        if leaf in place:
            raise _error(f"input {name!r} holds other inputs.")
        place[leaf] = position
    return {name: _listed(name, tree) for name, tree in top.items()}


def _listed(name: str, tree: Any) -> Tree:
    """Turn dicts whose keys are 0, 1, 2 … into lists."""
    if isinstance(tree, int):
        return tree
    inner = {key: _listed(f"{name}.{key}", value) for key, value in tree.items()}
    if not any(key.isdigit() for key in inner):
        return inner
    if sorted(inner, key=lambda key: (len(key), key)) != [str(index) for index in range(len(inner))]:
        raise _error(f"the inputs under {name!r} are {sorted(inner)}; a list needs 0, 1, 2 … without a gap.")
    return [inner[str(index)] for index in range(len(inner))]


def _assign(trees: Mapping[str, Tree], parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    """Return parameter name to argument; a tuple for *args, a dict for **kwargs."""
    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    by_place = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    given: dict[str, Any] = {n: t for n, t in trees.items() if n in parameters and parameters[n].kind in by_name}
    free = [p.name for p in parameters.values() if p.kind in by_place and p.name not in given]
    var_args = next((p.name for p in parameters.values() if p.kind is Parameter.VAR_POSITIONAL), None)
    var_kwargs = next((p.name for p in parameters.values() if p.kind is Parameter.VAR_KEYWORD), None)
    for name in trees:
        if name in given:
            continue
        if free and (var_kwargs is None or _required(parameters[free[0]])):
            given[free.pop(0)] = trees[name]
        elif var_args and not free:
            given[var_args] = (*given.get(var_args, ()), trees[name])
        elif var_kwargs:
            given[var_kwargs] = {**given.get(var_kwargs, {}), name: trees[name]}
        else:
            raise _error(f"forward() has no parameter {name!r} and no position left; it takes {list(parameters)}.")
    return given


def _complete(given: Mapping[str, Any], parameters: Mapping[str, Parameter]) -> None:
    for parameter in parameters.values():
        if _required(parameter) and parameter.name not in given:
            raise _error(
                f"forward() requires {parameter.name!r}, which the recipe does not list; it lists {list(given)}.",
                hint="Add it to model.inputs, or wrap the model in the factory so that forward() needs tensors only.",
            )


def _required(parameter: Parameter) -> bool:
    variable = parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return parameter.default is Parameter.empty and not variable


def _fill(tree: Tree, tensors: Sequence[Any]) -> Any:
    if isinstance(tree, int):
        return tensors[tree]
    if isinstance(tree, list):
        return [_fill(item, tensors) for item in tree]
    return {key: _fill(item, tensors) for key, item in tree.items()}


def _error(what: str, hint: str = "") -> VbpipeError:
    return VbpipeError(what, where="model.inputs", hint=hint)
