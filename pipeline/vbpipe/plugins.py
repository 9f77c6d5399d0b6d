"""Find stages and backends by module name, and import only what is asked for."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal, cast

from vbpipe.core import Backend, Stage
from vbpipe.errors import UsageError

Role = Literal["stages", "backends"]


@cache
def names(role: Role) -> Mapping[str, str]:
    """Return plug-in name to module name, without importing any of them.

    Raises:
        UsageError: two installed packages bring the same name.
    """
    found: dict[str, str] = {}
    for entry in sorted(entry_points(group="vbpipe.plugins"), key=lambda entry: entry.value):
        for name, module in _modules(entry.value, role):
            if found.setdefault(name, module) != module:
                raise UsageError(
                    f"two packages bring {role[:-1]} {name!r}: {found[name]} and {module}.",
                    hint="Uninstall one of them.",
                )
    return found


def stage(name: str) -> type[Stage]:
    """Return the stage class called `name`; raises UsageError with near matches."""
    return cast(type[Stage], _load("stages", name))


def backend(name: str) -> type[Backend]:
    """Return the backend class called `name`; raises UsageError with near matches."""
    return cast(type[Backend], _load("backends", name))


def unknown(role: Role, name: str) -> str:
    """Return the sentence that says `name` does not exist, with near matches and what is installed."""
    near = difflib.get_close_matches(name, names(role), n=1)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    return f"no {role[:-1]} {name!r}.{guess} Installed: {', '.join(sorted(names(role)))}."


def _modules(package: str, role: Role) -> list[tuple[str, str]]:
    wanted = package if role == "stages" else f"{package}.backends"
    try:
        spec = importlib.util.find_spec(wanted)
    except ModuleNotFoundError:
        return []
    if spec is None or spec.submodule_search_locations is None:
        return []
    found = pkgutil.iter_modules(list(spec.submodule_search_locations))
    return [(m.name, f"{wanted}.{m.name}") for m in found if not m.ispkg and not m.name.startswith("_")]


def _load(role: Role, name: str) -> Any:
    module = names(role).get(name)
    if module is None:
        raise UsageError(unknown(role, name))
    return importlib.import_module(module).PLUGIN
