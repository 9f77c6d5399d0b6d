"""Which precision each module was to have and which it has, over all targets: one table for each variant."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from vbpipe.report.table import Cell, Grid

_ABSENT = "-"


def precisions(report: Mapping[str, Any]) -> Iterator[Grid]:
    """Yield a table for each variant with quantized modules: what was asked, then what the engine computes in.

    Modules whose paths differ in numbers only and that fare alike share a row. An engine that can't be looked into has
    no second part.
    """
    asked, achieved = _by_variant(report, "modules"), _by_variant(report, "achieved")
    for variant, targets in asked.items():
        columns = tuple(targets)
        modules = list(dict.fromkeys(module for told in targets.values() for module in told))
        rows: dict[tuple[str, tuple[Cell, ...]], list[str]] = {}
        for module in modules:
            cells = tuple(_cell(module, targets[t], achieved.get(variant, {}).get(t)) for t in columns)
            rows.setdefault((re.sub(r"\d+", "*", module), cells), []).append(module)
        shown = tuple((Cell(_named(name, members)), *cells) for (name, cells), members in rows.items())
        name = report["recipe"]["name"]
        title = f"{name}, variant {variant}: precision of weights as asked, and as the engine has it"
        yield Grid(title, ("module", *columns), shown)


def _by_variant(report: Mapping[str, Any], key: str) -> dict[str, dict[str, Mapping[str, str]]]:
    """Return variant to target to what a step's meta says under `key`."""
    found: dict[str, dict[str, Mapping[str, str]]] = {}
    for step in report["steps"]:
        told = step["meta"].get(key)
        for identity in step["identities"] if isinstance(told, Mapping) and told else ():
            _, variant, target, *_ = identity.split("/")
            if target in report["targets"]:
                found.setdefault(variant, {})[target] = told
    return found


def _cell(module: str, asked: Mapping[str, str], achieved: Mapping[str, str] | None) -> Cell:
    wanted = asked.get(module, _ABSENT)
    if achieved is None or wanted in ("float", _ABSENT):
        return Cell(wanted, "faint" if wanted in ("float", _ABSENT) else "plain")
    has = achieved.get(module, "not seen")
    # "static int8 in fp16": the weight's own type comes first.
    type_of_weight = next((word for word in wanted.split() if any(digit in word for digit in "0123456789")), wanted)
    return Cell(f"{wanted}: {has}", "good" if type_of_weight in has.split(" and ") else "doubtful")


def _named(name: str, members: list[str]) -> str:
    return members[0] if len(members) == 1 else f"{name} ({len(members)})"
