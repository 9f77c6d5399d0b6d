"""Read amounts as people write them: 1% or 0.01, 90s, 10m or plain seconds."""

from __future__ import annotations

import math

import typer

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


def share(text: str) -> float:
    """Return a share: 0.01 from "1%" or "0.01"; raises BadParameter outside 0.001 to 1."""
    stripped = str(text).strip()  # typer hands over defaults as well, which are numbers
    value = _number(stripped.removesuffix("%")) / (100 if stripped.endswith("%") else 1)
    if not 0.001 <= value <= 1:
        raise typer.BadParameter(f"{text!r} is no share from 0.1% to 100%; write 1% or 0.01.")
    return value


def seconds(text: str) -> float:
    """Return seconds: 90.0 from "90", "90s" or "1.5m"; hours are "h". Raises BadParameter below one second."""
    stripped = str(text).strip()
    unit = _UNITS_S.get(stripped[-1:])
    value = _number(stripped[:-1] if unit else stripped) * (unit or 1.0)
    if not 1 <= value < math.inf:
        raise typer.BadParameter(f"{text!r} is no time of one second or more; write 90, 90s or 10m.")
    return value


def _number(text: str) -> float:
    """Return a number; not a number where there is none, which no bound allows."""
    try:
        return float(text)
    except ValueError:
        return math.nan
