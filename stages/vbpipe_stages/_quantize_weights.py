"""Round weights and activations' ranges to integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vbpipe_stages._calibration import Extent
from vbpipe_stages._quantize_rules import HighPrecision

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

SEVEN_BITS = 64
"""Largest magnitude at which a 16-bit sum of two products can't saturate: 2 * 255 * 64 < 2**15."""


@dataclass(frozen=True)
class Rounded:
    """Integers and what gives the floats back: (values - zero_point) * scale."""

    values: Array
    scale: Array
    zero_point: Array


def symmetric_int8(weight: Array, axis: int | None, largest: int, kind: HighPrecision = "fp32") -> Rounded:
    """Round to -largest..largest; `scale` is per index of `axis`, or one for all where that is None.

    Scales are numbers that `kind` can hold: what rounds with them and what gives the floats back agree.
    """
    import numpy as np

    over = tuple(other for other in range(weight.ndim) if other != axis) if axis is not None else None
    top = np.abs(weight).max(axis=over)
    scale = held(usable(top.astype(np.float64) / largest), kind)
    shape = [1] * weight.ndim
    if axis is not None:
        shape[axis] = -1
    values = np.rint(weight / scale.reshape(shape)).clip(-largest, largest).astype(np.int8)
    return Rounded(values, scale, np.zeros(scale.shape, np.int8))


def blocks(weight: Array, bits: int, group: int, *, symmetric: bool, kind: HighPrecision = "fp32") -> Rounded:
    """Round groups along axis 0 of a [K, N] weight to unsigned integers.

    Returns:
        values [K, N] uint8, scale [K/group, N] float32, zero_point [K/group, N] uint8. Symmetric groups have their zero
        point in the middle, and the value of largest magnitude at the end that reaches one further.
    """
    import numpy as np

    rows, columns = weight.shape
    grouped = weight.reshape(rows // group, group, columns).astype(np.float64)
    middle, largest = 2 ** (bits - 1), 2**bits - 1
    if symmetric:
        place = np.abs(grouped).argmax(axis=1, keepdims=True)
        extreme = np.take_along_axis(grouped, place, axis=1)[:, 0]
        scale = (extreme / -middle).astype(np.float32)
        scale[scale == 0] = 1.0
        scale = held(scale, kind)
        zero = np.full(scale.shape, middle, np.uint8)
    else:
        low, high = np.minimum(grouped.min(axis=1), 0.0), np.maximum(grouped.max(axis=1), 0.0)
        scale = held(usable((high - low) / largest), kind)
        zero = np.rint(-low / scale).clip(0, largest).astype(np.uint8)
    values = np.rint(grouped / scale[:, None]) + zero[:, None]
    return Rounded(values.clip(0, largest).astype(np.uint8).reshape(rows, columns), scale, zero)


def packed(rounded: Rounded, bits: int, group: int) -> tuple[Array, Array, Array]:
    """Return values, scales and zero points laid out for MatMulNBits: [N, K/group, bytes], [N*K/group], [N, bytes]."""
    import numpy as np

    rows, columns = rounded.values.shape
    values = rounded.values.T.reshape(columns, rows // group, group)
    zero = rounded.zero_point.T
    scales = np.ascontiguousarray(rounded.scale.T).reshape(-1)
    if bits == 8:
        return np.ascontiguousarray(values), scales, np.ascontiguousarray(zero)
    if zero.shape[1] % 2:
        zero = np.pad(zero, ((0, 0), (0, 1)))
    return _nibbles(values), scales, _nibbles(zero)


def activation(extent: Extent, dtype: str, *, symmetric: bool) -> tuple[float, int]:
    """Return scale and zero point of one tensor; `dtype` is "int8" or "uint8"."""
    low, high = (0, 255) if dtype == "uint8" else (-128, 127)
    if symmetric:
        scale = float(usable(max(-extent.low, extent.high) / 127))
        return scale, 128 if dtype == "uint8" else 0
    scale = float(usable((extent.high - extent.low) / 255))
    return scale, max(low, min(high, round(low - extent.low / scale)))


def usable(scale: Any) -> Array:
    """Return a scale in float32; 1 for what is all zeros, and nothing so small that dividing by it overflows."""
    import numpy as np

    scale = np.asarray(scale, np.float32)
    return np.where(scale < np.finfo(np.float32).tiny, np.float32(1.0), scale).astype(np.float32)


def held(scale: Array, kind: HighPrecision) -> Array:
    """Return float32 scales rounded to what a type can hold, none of them to zero."""
    import ml_dtypes
    import numpy as np

    if kind == "fp32":
        return scale
    rounded = scale.astype(np.float16 if kind == "fp16" else ml_dtypes.bfloat16).astype(np.float32)
    least = np.float32(np.finfo(np.float16).smallest_subnormal)
    return np.where(rounded == 0, np.copysign(least, scale), rounded).astype(np.float32)


def _nibbles(values: Array) -> Array:
    import numpy as np

    return np.ascontiguousarray(values[..., 0::2] | (values[..., 1::2] << 4))
