"""Find the range that each activation takes on real samples."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from vbpipe.core import Site
from vbpipe.errors import VbpipeError
from vbpipe_stages._watched import watched

if TYPE_CHECKING:
    import numpy as np
    import onnx

    Array = np.ndarray[Any, Any]

_BINS = 2048
_LEVELS = 128
"""Magnitudes that an 8-bit activation can tell apart on one side of zero."""
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Method:
    """How a range is cut.

    minmax: not at all. percentile: magnitudes above that share of all are cut off. entropy: where the cut and rounded
    distribution is closest to the whole one (Kullback-Leibler; S. Migacz, "8-bit inference with TensorRT", GTC 2017).
    """

    name: Literal["minmax", "entropy", "percentile"]
    percentile: float = 99.99


@dataclass(frozen=True)
class Extent:
    """Lowest and highest value to represent; zero is always between them."""

    low: float
    high: float


def collect(
    model: onnx.ModelProto,
    wanted: Mapping[str, Method],
    rows: Sequence[Mapping[str, Array]],
    names: Mapping[str, str],
    site: Site,
) -> dict[str, Extent]:
    """Return tensor to extent, from running `rows` one by one, whatever their shapes.

    Memory holds one row's activations per thread; a second pass over the rows makes the histograms. Each row runs on
    one thread, so the number of threads changes nothing.

    Args:
        model: the float graph.
        wanted: tensor to method.
        rows: input name to array.
        names: tensor to the module that reads it, for messages.
        site: threads, and where progress goes.

    Raises:
        VbpipeError: there are no rows, the graph fails on one, or a tensor holds NaN or infinity.
    """
    if not rows:
        raise VbpipeError(
            "there is no calibration sample.", hint="Set data.calibration, or use `calibration: dynamic`."
        )
    tensors = list(wanted)
    with tempfile.TemporaryDirectory() as folder:
        session = watched(model, tensors, Path(folder))
        extents = _merge_extents(_each(session, tensors, rows, site, _extents), names)
        cut = [name for name in tensors if wanted[name].name != "minmax"]
        if not cut:
            return extents
        tops = {name: max(-extents[name].low, extents[name].high) for name in cut}
        counts: dict[str, Array] = {}
        for found in _each(session, cut, rows, site, lambda values: _histograms(values, tops)):
            counts = {name: counts[name] + found[name] if counts else found[name] for name in cut}
    return {**extents, **{name: _cut(extents[name], counts[name], tops[name], wanted[name]) for name in cut}}


def _each(
    session: Any,
    tensors: Sequence[str],
    rows: Sequence[Mapping[str, Array]],
    site: Site,
    reduce: Callable[[Mapping[str, Array]], _Result],
) -> Iterator[_Result]:
    """Give each row's reduced activations, in the order of the rows, `site.threads` rows at a time."""
    taken = [value.name for value in session.get_inputs()]
    made = [name for name in tensors if name not in taken]

    def one(row: Mapping[str, Array]) -> _Result:
        values = session.run(made, {name: row[name] for name in taken}) if made else []
        return reduce(
            {**{name: row[name] for name in tensors if name in taken}, **dict(zip(made, values, strict=True))}
        )

    with ThreadPoolExecutor(site.threads) as pool:
        for start in range(0, len(rows), site.threads):
            site.progress(start / len(rows), "calibrate")
            yield from pool.map(one, rows[start : start + site.threads])


def _extents(values: Mapping[str, Array]) -> dict[str, tuple[float, float]]:
    return {name: (float(v.min(initial=0.0)), float(v.max(initial=0.0))) for name, v in values.items()}


def _merge_extents(found: Iterator[Mapping[str, tuple[float, float]]], names: Mapping[str, str]) -> dict[str, Extent]:
    import math

    merged: dict[str, Extent] = {}
    for index, row in enumerate(found):
        for name, (low, high) in row.items():
            if not (math.isfinite(low) and math.isfinite(high)):
                raise VbpipeError(
                    f"the input of {names.get(name) or name} holds NaN or infinity on calibration sample {index}.",
                    where="data.calibration",
                    hint="Leave that sample out, or keep the module in float with a rule.",
                )
            old = merged.get(name, Extent(0.0, 0.0))
            merged[name] = Extent(min(old.low, low), max(old.high, high))
    return merged


def _histograms(values: Mapping[str, Array], tops: Mapping[str, float]) -> dict[str, Array]:
    """Count magnitudes, less the zeros: every scheme holds them exactly, and after a ReLU they outnumber the rest."""
    import numpy as np

    found: dict[str, Array] = {}
    for name, value in values.items():
        sizes = np.abs(value[value != 0]).astype(np.float64, copy=False)
        found[name] = np.histogram(sizes, bins=_BINS, range=(0.0, tops[name] or 1.0))[0].astype(np.int64)
    return found


def _cut(extent: Extent, counts: Array, top: float, method: Method) -> Extent:
    if counts.sum() == 0:
        return extent
    share = _entropy_bins(counts) if method.name == "entropy" else _percentile_bins(counts, method.percentile)
    limit = top * share / _BINS
    return Extent(max(extent.low, -limit), min(extent.high, limit))


def _percentile_bins(counts: Array, percentile: float) -> int:
    import numpy as np

    reached = np.cumsum(counts) / counts.sum()
    return int(np.searchsorted(reached, percentile / 100 - 1e-12)) + 1


def _entropy_bins(counts: Array) -> int:
    """Return how many bins to keep: the number whose cut and rounded histogram diverges least from the whole."""
    best, kept = float("inf"), _BINS
    for bins in range(_LEVELS, _BINS + 1, 16):
        divergence = _divergence(counts, bins)
        if divergence < best:
            best, kept = divergence, bins
    return kept


def _divergence(counts: Array, bins: int) -> float:
    """Return KL(p || q): p is the histogram with what is cut off put into the last bin, q the rounded one."""
    import numpy as np

    inside = counts[:bins].astype(np.float64)
    whole = inside.copy()
    whole[-1] += counts[bins:].sum()
    starts = (np.arange(_LEVELS) * bins) // _LEVELS
    sums = np.add.reduceat(inside, starts)
    filled = np.add.reduceat((inside > 0).astype(np.float64), starts)
    mean = np.divide(sums, filled, out=np.zeros_like(sums), where=filled > 0)
    rounded = np.repeat(mean, np.diff(np.append(starts, bins))) * (inside > 0)
    # Mass in p where q has none makes the divergence infinite; a little of q everywhere keeps the order.
    p = whole / whole.sum()
    q = (rounded + 1e-6) / (rounded + 1e-6).sum() if rounded.sum() else np.full(bins, 1.0 / bins)
    used = p > 0
    return float((p[used] * np.log(p[used] / q[used])).sum())
