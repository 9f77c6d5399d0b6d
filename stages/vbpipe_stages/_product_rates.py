"""The highest rates of ONNX Runtime's matrix products, by timing graphs of one product."""

from __future__ import annotations

import importlib.util
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vbpipe.errors import EngineError
from vbpipe_stages import _onnx_graph

if TYPE_CHECKING:
    import numpy as np
    import onnx
    import onnxruntime

    Array = np.ndarray[Any, Any]

Opener = Callable[[Path], "onnxruntime.InferenceSession"]
"""Opens the graph in a directory."""


@dataclass(frozen=True)
class Product:
    """[m, k] times [k, n]."""

    m: int
    k: int
    n: int

    @property
    def operations(self) -> int:
        """Return how many it takes, a multiply-add as two."""
        return 2 * self.m * self.k * self.n


PRODUCTS = (Product(256, 768, 768), Product(512, 512, 512), Product(256, 1024, 1024), Product(1024, 1024, 1024))
"""Small ones stay in a core's own cache, the larger ones give many threads enough to do."""

_MIN_CALLS = 5


@dataclass(frozen=True)
class _Form:
    operator: str
    activations: Literal["float32", "uint8", "int8"]
    weights: Literal["float32", "int8"]
    result: Literal["float32", "int32"]


_FORMS: Mapping[str, _Form] = {
    "fp32": _Form("MatMul", "float32", "float32", "float32"),
    "int8_u8s8": _Form("MatMulInteger", "uint8", "int8", "int32"),
    "int8_s8s8": _Form("MatMulInteger", "int8", "int8", "int32"),
}
"""Constant weights, which ONNX Runtime packs on loading, and for integers no zero points and no scaling: the bare
kernels that quantized operators end in."""


def best_rates(
    opened: Opener, products: Sequence[Product] = PRODUCTS, seconds_each: float = 0.25
) -> Mapping[str, float]:
    """Return form to the highest rate of any call of any product, in 10^9 operations a second.

    Args:
        seconds_each: how long each product of each form is repeated; five times at least.

    Raises:
        EngineError: onnx is missing.
    """
    if importlib.util.find_spec("onnx") is None:
        raise EngineError("onnx, which writes the products, is not installed.", hint="pip install 'vbpipe[build]'")
    return {
        name: max(_rate(opened, form, product, seconds_each) for product in products) for name, form in _FORMS.items()
    }


def _rate(opened: Opener, form: _Form, product: Product, seconds: float) -> float:
    with tempfile.TemporaryDirectory(prefix="vbpipe-product-") as folder:
        _onnx_graph.write(_graph(form, product), Path(folder))
        session = opened(Path(folder))
    feed = {"x": _values(form.activations, product.m, product.k)}
    session.run(["y"], feed)
    best_s, calls, end = math.inf, 0, time.perf_counter() + seconds
    while calls < _MIN_CALLS or time.perf_counter() < end:
        begin = time.perf_counter()
        session.run(["y"], feed)
        best_s = min(best_s, time.perf_counter() - begin)
        calls += 1
    return product.operations / best_s / 1e9


def _graph(form: _Form, product: Product) -> onnx.ModelProto:
    import numpy as np
    from onnx import helper, numpy_helper

    def described(name: str, dtype: str, *shape: int) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)

    graph = helper.make_graph(
        [helper.make_node(form.operator, ["x", "w"], ["y"])],
        "product",
        [described("x", form.activations, product.m, product.k)],
        [described("y", form.result, product.m, product.n)],
        [numpy_helper.from_array(_values(form.weights, product.k, product.n), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _values(dtype: str, rows: int, columns: int) -> Array:
    import numpy as np

    generator = np.random.Generator(np.random.PCG64(0))
    if dtype == "float32":
        return generator.standard_normal((rows, columns), dtype=np.float32)
    limits = np.iinfo(dtype)
    return generator.integers(limits.min, limits.max, (rows, columns), dtype=dtype, endpoint=True)
