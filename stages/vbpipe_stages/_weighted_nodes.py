"""Find the nodes whose weight is constant, and read it the way the quantized forms need it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vbpipe_stages import _onnx_graph

if TYPE_CHECKING:
    import numpy as np
    import onnx

    Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Weighted:
    """A node whose weight is constant: what `lower` needs to rewrite it."""

    node: onnx.NodeProto
    weight: Array
    """[K, N] of MatMul and Gemm, [out, in/groups, ...] of Conv, [rows, width] of Gather."""
    weight_name: str
    source: str
    """The constant that the weight is, or is a transpose of: modules with tied weights have it in common."""
    bias: Array | None = None
    """Of Gemm, `beta` included; None where there is none."""

    @property
    def data(self) -> str:
        """The tensor that the weight is applied to."""
        return str(self.node.input[1 if self.node.op_type == "Gather" else 0])


def weighted(model: onnx.ModelProto) -> tuple[dict[str, Weighted], dict[str, str]]:
    """Return output tensor to node with a constant weight, and output to why a like node can't be rewritten.

    A Transpose of a constant counts as a constant: exporters write tied weights so.
    """
    weights = _onnx_graph.constants(model.graph)
    turned = {n.output[0]: n for n in model.graph.node if n.op_type == "Transpose" and n.input[0] in weights}
    found: dict[str, Weighted] = {}
    unfit: dict[str, str] = {}
    for node in model.graph.node:
        slot = {"MatMul": 1, "Gemm": 1, "Conv": 1, "Gather": 0}.get(node.op_type)
        if slot is None or node.domain not in ("", "ai.onnx"):
            continue
        name = node.input[slot]
        weight = _constant(name, weights, turned)
        if weight is None:
            continue
        made = _fit(node, weight, name, turned[name].input[0] if name in turned else name, weights)
        if isinstance(made, Weighted):
            found[node.output[0]] = made
        else:
            unfit[node.output[0]] = made
    return found, unfit


def _constant(name: str, weights: Mapping[str, onnx.TensorProto], turned: Mapping[str, onnx.NodeProto]) -> Array | None:
    from onnx import numpy_helper

    if name not in weights and name not in turned:
        return None
    weight: Array = numpy_helper.to_array(weights[name if name in weights else turned[name].input[0]])
    if name in weights:
        return weight
    return weight.transpose(_onnx_graph.attributes(turned[name]).get("perm", tuple(range(weight.ndim))[::-1]))


def _fit(
    node: onnx.NodeProto, weight: Array, name: str, source: str, weights: Mapping[str, onnx.TensorProto]
) -> Weighted | str:
    from onnx import numpy_helper

    if weight.dtype != "float32":
        return f"its weight is {weight.dtype}, not float32"
    if node.op_type == "Conv":
        return Weighted(node, weight, name, source)
    if weight.ndim != 2:
        return f"its weight has {weight.ndim} axes, not 2"
    facts = _onnx_graph.attributes(node)
    if node.op_type == "Gather":
        return Weighted(node, weight, name, source) if facts.get("axis", 0) == 0 else "it does not gather rows"
    if node.op_type == "MatMul":
        return Weighted(node, weight, name, source)
    if facts.get("transA", 0):
        return "its input is transposed (transA)"
    turned = weight.T if facts.get("transB", 0) else weight
    alpha, beta = facts.get("alpha", 1.0), facts.get("beta", 1.0)
    bias_name = node.input[2] if len(node.input) > 2 else ""
    if bias_name and bias_name not in weights:
        return "its bias is not constant"
    bias = numpy_helper.to_array(weights[bias_name]) * _like(beta) if bias_name else None
    own = f"{name}__{'t' if facts.get('transB', 0) else 'n'}{alpha:g}"
    return Weighted(node, turned * _like(alpha), own, source, bias)


def _like(value: float) -> Any:
    import numpy as np

    return np.float32(value)
