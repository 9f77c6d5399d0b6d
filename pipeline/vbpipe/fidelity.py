"""How close outputs are to eager's: the figures that gates read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


EXACT_DB = 300.0
"""Stands for equal outputs in `sqnr_db`: JSON has no infinity, and no float32 result comes near it."""


@dataclass(frozen=True)
class Fidelity:
    """Closeness of one set of outputs to eager's, over all outputs and samples.

    `cosine` is the mean, over samples, of the lowest cosine of the sample's outputs, each output flattened per leading
    index; `cosine_min` the lowest of all. `sqnr_db` is 10*log10(signal power / error power) over everything.
    `top1_agreement` is the share of rows whose largest entry is at the same place, over the first output, None where
    its last axis has fewer than three entries or it isn't floating point. `max_relative` divides by the largest
    absolute reference value of that output (by 1 where that is 0).
    """

    samples: int
    rows: int
    cosine: float
    cosine_min: float
    sqnr_db: float
    max_abs: float
    max_relative: float
    top1_agreement: float | None

    def as_metrics(self) -> dict[str, float]:
        """Return the figures by the names that gates use."""
        figures = {
            "cosine": self.cosine,
            "cosine_min": self.cosine_min,
            "sqnr_db": self.sqnr_db,
            "max_abs": self.max_abs,
            "max_relative": self.max_relative,
        }
        return figures if self.top1_agreement is None else {**figures, "top1_agreement": self.top1_agreement}


def broken(outputs: Mapping[str, Array], expected: Mapping[str, Array]) -> str | None:
    """Return what makes `outputs` unusable next to eager's (missing, shape, dtype, NaN or infinity), or None.

    A value that is not finite in eager's own output may be the same in `outputs`.
    """
    import numpy as np

    for name, reference in expected.items():
        if name not in outputs:
            return f"output {name!r} is missing; there are {sorted(outputs)}"
        array = outputs[name]
        if array.shape != reference.shape:
            return f"output {name!r} has shape {list(array.shape)}; eager's has {list(reference.shape)}"
        if array.dtype != reference.dtype:
            return f"output {name!r} is {array.dtype}; eager's is {reference.dtype}"
        if array.dtype.kind == "f":
            bad = ~np.isfinite(array) & np.isfinite(reference)
            if bad.any():
                return (
                    f"output {name!r} holds {int(bad.sum())} values that are NaN or infinite where eager's are finite"
                )
    return None


def compare(outputs: Sequence[Mapping[str, Array]], expected: Sequence[Mapping[str, Array]]) -> Fidelity:
    """Return how close `outputs` are to `expected`, sample by sample; both must be free of what `broken` finds."""
    import numpy as np

    cosines: list[float] = []
    lowest, signal, noise, max_abs, max_relative, agree, rows = 1.0, 0.0, 0.0, 0.0, 0.0, 0, 0
    top1 = True
    for got_row, want_row in zip(outputs, expected, strict=True):
        sample_cosine = 1.0
        for index, (name, want_raw) in enumerate(want_row.items()):
            want, got = _rows(want_raw), _rows(got_row[name])
            per_row = _cosines(got, want)
            sample_cosine = min(sample_cosine, float(per_row.mean()) if per_row.size else 1.0)
            lowest = min(lowest, float(per_row.min()) if per_row.size else 1.0)
            error = got - want
            signal += float((want * want).sum())
            noise += float((error * error).sum())
            worst = float(np.abs(error).max()) if error.size else 0.0
            scale = float(np.abs(want).max()) if want.size else 0.0
            max_abs = max(max_abs, worst)
            max_relative = max(max_relative, worst / scale if scale else (0.0 if worst == 0 else worst))
            if index == 0:
                top1 = top1 and want_raw.dtype.kind == "f" and want_raw.ndim >= 2 and want_raw.shape[-1] >= 3
                if top1:
                    last = want_raw.shape[-1]
                    same = want_raw.reshape(-1, last).argmax(1) == got_row[name].reshape(-1, last).argmax(1)
                    agree, rows = agree + int(same.sum()), rows + int(same.size)
        cosines.append(sample_cosine)
    sqnr = EXACT_DB if noise == 0 else 10 * math.log10(signal / noise) if signal else -EXACT_DB
    return Fidelity(
        samples=len(cosines),
        rows=rows,
        cosine=float(np.mean(cosines)) if cosines else math.nan,
        cosine_min=lowest if cosines else math.nan,
        sqnr_db=sqnr,
        max_abs=max_abs,
        max_relative=max_relative,
        top1_agreement=agree / rows if top1 and rows else None,
    )


def _rows(array: Array) -> Array:
    import numpy as np

    wide = np.asarray(array, dtype=np.float64)
    # A non-finite value that both sides share says nothing about closeness and would poison every sum.
    wide = np.where(np.isfinite(wide), wide, 0.0)
    return wide.reshape(wide.shape[0], math.prod(wide.shape[1:])) if wide.ndim >= 2 else wide.reshape(1, wide.size)


def _cosines(got: Array, want: Array) -> Array:
    import numpy as np

    norms = np.linalg.norm(got, axis=1) * np.linalg.norm(want, axis=1)
    products = (got * want).sum(axis=1)
    both_zero = (np.abs(got).max(axis=1, initial=0) == 0) & (np.abs(want).max(axis=1, initial=0) == 0)
    return np.where(both_zero, 1.0, np.divide(products, norms, out=np.zeros_like(products), where=norms > 0))
