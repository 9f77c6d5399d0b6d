"""Tell whether an exported program computes what eager computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vbpipe import fidelity, samples
from vbpipe.core import Run
from vbpipe.errors import EngineError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    Row = Mapping[str, Array]

_RELATIVE = {"float64": 1e-3, "float32": 1e-3, "float16": 2e-2}
"""Largest difference that export may make, as a share of the output's largest value. Other orders of summation give
about 1e-6 in float32, and a length or a branch baked in gives far more than 1e-3."""
_FLIPPED = 1e-3
"""Share of integer or boolean values that may differ: a tie may go the other way."""


def disagreement(
    run: Run, rows: Sequence[Row], expected: Sequence[Row], sizes: Sequence[Mapping[str, int]]
) -> str | None:
    """Return at which size and in which output `run` first differs from eager, or None where it never does."""
    for row, wanted, size in zip(rows, expected, sizes, strict=True):
        at = samples.describe(size)
        try:
            got = run(row)
        except EngineError as error:
            return f"at {at} it fails: {error.what}"
        problem = fidelity.broken(got, wanted) or _difference(got, wanted)
        if problem:
            return f"at {at} {problem}"
    return None


def _difference(got: Row, wanted: Row) -> str | None:
    import numpy as np

    for name, reference in wanted.items():
        if reference.dtype.kind != "f":
            share = float((got[name] != reference).mean()) if reference.size else 0.0
            if share > _FLIPPED:
                return f"output {name!r} differs from eager's in {share:.1%} of its values"
            continue
        wide, exact = got[name].astype(np.float64), reference.astype(np.float64)
        finite = np.isfinite(exact)
        worst = float(np.abs(wide - exact)[finite].max(initial=0.0))
        scale = float(np.abs(exact)[finite].max(initial=0.0))
        if worst > _RELATIVE[str(reference.dtype)] * scale + 1e-6:
            return f"output {name!r} differs from eager's by {worst:.3g} where the largest value is {scale:.3g}"
    return None
