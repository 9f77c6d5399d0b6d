"""Decide whether a candidate's outputs may be timed at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Arrays = Mapping[str, np.ndarray[Any, Any]]


def fault(outputs: Arrays, expected: Arrays | None, min_cosine: float | None) -> str:
    """Return what is wrong with `outputs` as one clause, or "" when nothing is.

    Names, shapes and dtypes must be those expected, and values finite wherever the expected ones are. `min_cosine`
    applies to floating outputs only: closeness of integers (a class, a token) says nothing about how wrong they are.
    """
    if not isinstance(outputs, Mapping):
        return f"the run returned {type(outputs).__name__}, not a mapping of output names to arrays"
    if expected is not None and set(outputs) != set(expected):
        return f"outputs are {sorted(outputs)}, expected {sorted(expected)}"
    for name, got in outputs.items():
        found = _array_fault(got, None if expected is None else expected[name], min_cosine)
        if found:
            return f"output {name!r} {found}"
    return ""


def cosine(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> float:
    """Return the cosine similarity of two arrays of one shape, in float64; 1.0 when both are all zero or empty."""
    import numpy as np

    a, b = left.astype(np.float64).ravel(), right.astype(np.float64).ravel()
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    if lengths == 0.0:
        return float(not a.any() and not b.any())
    return float(a @ b) / lengths


def _array_fault(got: object, expected: np.ndarray[Any, Any] | None, min_cosine: float | None) -> str:
    import numpy as np

    if not isinstance(got, np.ndarray):
        return f"is a {type(got).__name__}, not an array"
    floating = np.issubdtype(got.dtype, np.floating)
    if expected is None:
        return "is not finite" if floating and not np.isfinite(got).all() else ""
    if got.shape != expected.shape:
        return f"has shape {list(got.shape)}, expected {list(expected.shape)}"
    if got.dtype != expected.dtype:
        return f"has dtype {got.dtype}, expected {expected.dtype}"
    if not floating:
        return ""
    finite = np.isfinite(expected)
    if not np.array_equal(np.isfinite(got), finite):
        return "is not finite where the expected one is, or the other way round"
    similarity = cosine(got[finite], expected[finite])
    if min_cosine is not None and similarity < min_cosine:
        return f"has cosine {similarity:.6f} to the expected one, below {min_cosine:g}"
    return ""
