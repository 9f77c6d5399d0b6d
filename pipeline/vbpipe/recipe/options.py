"""Check the parts of a recipe whose types come from plug-ins: the stages' options and the backends'."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel
from pydantic.json_schema import SkipJsonSchema

from vbpipe import plugins
from vbpipe.errors import Problem
from vbpipe.recipe.document import Node, child, entries, locate, quote
from vbpipe.recipe.model import Target
from vbpipe.recipe.wording import check, known_keys, listing, suggest


def gather_backend_options(root: Node) -> tuple[Node, list[Problem]]:
    """Return the tree with each target's further keys moved into its `options`, and the keys written in both."""
    problems: list[Problem] = []
    targets = child(root, "targets")
    if targets is None or not isinstance(targets.value, Mapping):
        return root, []
    gathered: dict[str, Node] = {}
    for name, target in targets.value.items():
        gathered[name], found = _gathered(target)
        problems += found
    return Node(root.place, {**entries(root), "targets": Node(targets.place, gathered)}), problems


def check_targets(root: Node) -> list[Problem]:
    """Return what is wrong with the backends' names and options, for a tree whose options are gathered."""
    problems: list[Problem] = []
    for target in entries(child(root, "targets")).values():
        backend = child(target, "backend")
        if backend is None or not isinstance(backend.value, str):
            continue
        if backend.value not in plugins.names("backends"):
            there = plugins.names("backends")
            message = f"no backend {quote(backend.value)}.{suggest(backend.value, there)}{listing('Backends', there)}"
            problems.append(backend.place.problem(message))
            continue
        options = child(target, "options") or Node(target.place, {})
        try:
            spec = plugins.backend(backend.value)
        except (ImportError, AttributeError) as error:
            problems.append(backend.place.problem(f"backend {quote(backend.value)} can't be imported: {error}."))
            continue
        if issubclass(spec, BaseModel) and isinstance(options.value, Mapping):
            problems += check(spec, options, also=frozenset(Target.model_fields) - {"options"})[1]
    return problems


def check_stages(root: Node) -> list[Problem]:
    """Return what is wrong with the names under `stages` and with each stage's options."""
    problems: list[Problem] = []
    for name, options in entries(child(root, "stages")).items():
        spec, problem = _stage(name, options)
        if problem:
            problems.append(problem)
        elif spec is not None and isinstance(options.value, Mapping):
            problems += check(spec, options)[1]
            problems += _own_fields(spec, options)
    return problems


def check_shared_stages(changes: Node) -> list[Problem]:
    """Return each change by which a variant would alter a stage that looks at all variants of a target together."""
    problems: list[Problem] = []
    nested = entries(locate(changes, "stages"))
    dotted_keys = {key.split(".")[1]: value for key, value in entries(changes).items() if key.startswith("stages.")}
    for name, value in {**nested, **dotted_keys}.items():
        spec, _ = _stage(name, value)
        if spec is not None and getattr(spec, "scope", "") == "target":
            message = (
                f"{quote(name)} looks at all variants together, so a variant can't change it. Set it under stages."
            )
            problems.append(value.place.problem(message))
    return problems


def recipe_stages() -> dict[str, type[BaseModel]]:
    """Return the stages that have options in a recipe, by name in alphabetical order."""
    found = [(name, plugins.stage(name)) for name in sorted(plugins.names("stages"))]
    return {name: spec for name, spec in found if issubclass(spec, BaseModel) and getattr(spec, "in_recipe", False)}


def _gathered(target: Node) -> tuple[Node, list[Problem]]:
    keys = entries(target)
    if "backend" not in keys:
        # Whose options they would be isn't known, so the model reports them as unknown keys.
        return target, []
    further = {key: value for key, value in keys.items() if key not in Target.model_fields}
    options = keys.get("options", Node(target.place, {}))
    if not further or not isinstance(options.value, Mapping):
        return target, []
    twice = [
        value.place.problem("also written under options; keep one.")
        for key, value in further.items()
        if key in options.value
    ]
    own = {key: value for key, value in keys.items() if key in Target.model_fields}
    return Node(target.place, {**own, "options": Node(options.place, {**options.value, **further})}), twice


def _own_fields(spec: type[BaseModel], options: Node) -> list[Problem]:
    """Return the keys that are no options: fields typed `SkipJsonSchema[…]` are the stage's own to set."""
    marker: type = SkipJsonSchema
    own = {name for name, field in spec.model_fields.items() if any(isinstance(m, marker) for m in field.metadata)}
    written = {key: value for key, value in entries(options).items() if key in own}
    keys = listing("Keys", known_keys(spec)) if written else ""
    return [value.place.problem(f"no key {quote(key)}.{keys}") for key, value in written.items()]


def _stage(name: str, options: Node) -> tuple[type[BaseModel] | None, Problem | None]:
    if name not in plugins.names("stages"):
        there = recipe_stages()
        message = f"no stage {quote(name)}.{suggest(name, there)}{listing('Stages', there)}"
        return None, options.place.problem(message)
    try:
        spec = plugins.stage(name)
    except (ImportError, AttributeError) as error:
        return None, options.place.problem(f"stage {quote(name)} can't be imported: {error}.")
    if not issubclass(spec, BaseModel) or not getattr(spec, "in_recipe", False):
        there = recipe_stages()
        message = f"stage {quote(name)} has no options in a recipe.{listing('Stages that do', there)}"
        return None, options.place.problem(message)
    return spec, None
