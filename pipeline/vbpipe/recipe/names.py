"""Check that every name in a recipe leads to something: shape symbols, scenarios, gates, inputs and outputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import cast

from vbpipe.decide import BASELINE, MEASURED
from vbpipe.errors import Problem
from vbpipe.recipe.document import Node, Place, child, entries, items, locate, plain, quote
from vbpipe.recipe.model import Dimension
from vbpipe.recipe.wording import check, listing, suggest
from vbpipe.samples import describe


def check_names(root: Node) -> Iterator[Problem]:
    """Yield every dangling or contradicting name; parts of the wrong type are passed over, the model reports those."""
    yield from _input_names(root)
    yield from _symbols(root)
    yield from _outputs(root)
    yield from _scenarios(root)
    yield from _gates(root)


def gate_scenarios(gate: Node, root: Node) -> tuple[str, ...]:
    """Return the scenarios that a gate holds for, named as reports name them: each with every symbol, in their order.

    Sizes of the wrong type are passed over, as they are reported anyway.
    """
    shapes = entries(locate(root, "model", "shapes"))
    optimum = {name: plain(child(node, "opt") or node) for name, node in shapes.items()}
    scenario = child(gate, "scenario")
    if scenario is not None and isinstance(scenario.value, str):
        written = dict(part.split("=", 1) for part in scenario.value.replace(" ", "").split(",") if "=" in part)
        asked: list[dict[str, object]] = [{name: int(size) for name, size in written.items() if size.isdecimal()}]
    else:
        asked = [
            {name: plain(size) for name, size in entries(sizes).items()}
            for stage in entries(child(root, "stages")).values()
            for sizes in items(child(stage, "scenarios"))
        ]
    complete = ({**optimum, **sizes} for sizes in asked or [{}])
    return tuple(describe(cast("dict[str, int]", s)) for s in complete if all(isinstance(v, int) for v in s.values()))


def _input_names(root: Node) -> Iterator[Problem]:
    inputs = entries(locate(root, "model", "inputs"))
    for name, node in inputs.items():
        if not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", name, re.ASCII):
            yield node.place.problem(f"{quote(name)} is no input name: use letters, digits and '_', and dots to nest.")
        outer = next((other for other in inputs if name.startswith(f"{other}.")), None)
        if outer:
            yield node.place.problem(
                f"{quote(outer)} is a tensor, so nothing can be nested in it. Rename one of the two."
            )


def _symbols(root: Node) -> Iterator[Problem]:
    shapes = entries(locate(root, "model", "shapes"))
    inputs = entries(locate(root, "model", "inputs"))
    used: set[object] = set()
    for node in inputs.values():
        for size in items(child(node, "shape")):
            used.add(size.value)
            if isinstance(size.value, str) and size.value not in shapes:
                yield size.place.problem(_no_symbol(size.value, shapes))
    for name, node in shapes.items():
        if inputs and name not in used:
            yield node.place.problem(f"no input has {quote(name)} in its shape. Remove it, or use it.")


def _no_symbol(name: str, shapes: Mapping[str, Node]) -> str:
    return f"{quote(name)} is not in model.shapes.{suggest(name, shapes)}{listing('Symbols', shapes)}"


def _outputs(root: Node) -> Iterator[Problem]:
    seen: set[object] = set()
    for node in items(locate(root, "model", "outputs")):
        if isinstance(node.value, str) and node.value in seen:
            yield node.place.problem(f"{quote(node.value)} is listed twice.")
        seen.add(node.value if isinstance(node.value, str) else None)


def _scenarios(root: Node) -> Iterator[Problem]:
    """Any stage may have an option `scenarios`, a list of {symbol: size}."""
    shapes = entries(locate(root, "model", "shapes"))
    for stage in entries(child(root, "stages")).values():
        for scenario in items(child(stage, "scenarios")):
            for symbol, size in entries(scenario).items():
                if symbol not in shapes:
                    message = (
                        f"{quote(symbol)} is not in model.shapes.{suggest(symbol, shapes)}{listing('Symbols', shapes)}"
                    )
                    yield size.place.problem(message)
                else:
                    yield from _outside(size, shapes[symbol], symbol)


def _outside(size: Node, profile: Node, symbol: str) -> Iterator[Problem]:
    dimension, _ = check(Dimension, profile) if isinstance(profile.value, Mapping) else (None, [])
    value = size.value
    if dimension is None or not isinstance(value, int) or isinstance(value, bool):
        return
    if not dimension.min <= value <= dimension.max:
        yield size.place.problem(
            f"{value} is outside model.shapes.{symbol}, which goes from {dimension.min} to {dimension.max}."
        )


def _gates(root: Node) -> Iterator[Problem]:
    there = (BASELINE, "previous", *entries(child(root, "variants")))
    evaluation = locate(root, "data", "evaluation")
    has_evaluation = evaluation is not None and evaluation.value is not None
    scenarios = _scenario_names(root)
    for gate in items(child(root, "gates")):
        metric, scenario, over = _text(child(gate, "metric")), _text(child(gate, "scenario")), child(gate, "over")
        if over and isinstance(over.value, str) and over.value not in there:
            message = f"there is no {quote(over.value)} to compare with."
            yield over.place.problem(f"{message}{suggest(over.value, there)}{listing('There are', there)}")
        wrong = list(_metric(*metric, has_evaluation)) if metric else []
        yield from wrong
        compared = over is not None and isinstance(over.value, str | Mapping)
        if over and compared and metric and not wrong and metric[1] != "speedup" and not child(gate, "max_drop"):
            message = f"min and max of {quote(metric[1])} are not over anything. over is for speedup and max_drop."
            yield over.place.problem(message)
        if scenario and scenarios and scenario[1] not in scenarios:
            names = set(scenarios.values())
            message = f"no scenario {quote(scenario[1])}.{suggest(scenario[1], names)}{listing('Scenarios', names)}"
            yield scenario[0].problem(message)


def _text(node: Node | None) -> tuple[Place, str] | None:
    return (node.place, node.value) if node is not None and isinstance(node.value, str) else None


def _metric(place: Place, name: str, has_evaluation: bool) -> Iterator[Problem]:
    if name in MEASURED:
        return
    if not has_evaluation:
        message = (
            f"no metric {quote(name)} without data.evaluation.{suggest(name, MEASURED)}{listing('Metrics', MEASURED)}"
        )
        yield place.problem(message)
        return
    # An evaluation's own metrics aren't known before it has run, so only a slip of one letter counts as one.
    meant = next((known for known in sorted(MEASURED) if _one_slip(name, known)), None)
    if meant:
        yield place.problem(
            f"{quote(name)} looks like a misspelt {quote(meant)}. If it is a metric of yours, rename it."
        )


def _scenario_names(root: Node) -> dict[str, str]:
    """Return what a gate may call each scenario, to the name as the recipe writes it; empty where none are listed."""
    shapes = entries(locate(root, "model", "shapes"))
    names: dict[str, str] = {}
    for stage in entries(child(root, "stages")).values():
        for scenario in items(child(stage, "scenarios")):
            sizes = plain(scenario)
            if isinstance(sizes, dict):
                written = describe(sizes)
                complete = {name: sizes.get(name, plain(child(node, "opt") or node)) for name, node in shapes.items()}
                in_order = {name: sizes[name] for name in shapes if name in sizes}
                names |= dict.fromkeys((written, describe(complete), describe(in_order)), written)
    return names


def _one_slip(written: str, meant: str) -> bool:
    """Return whether one letter added, left out, changed or swapped with its neighbour makes `meant` of `written`."""
    shorter, longer = sorted((written, meant), key=len)
    if len(longer) - len(shorter) > 1:
        return False
    start = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(shorter))
    a, b = shorter[start:], longer[start:]
    if len(a) < len(b):
        return a == b[1:]
    return a[1:] == b[1:] or (len(a) >= 2 and a[:2] == b[1::-1] and a[2:] == b[2:])
