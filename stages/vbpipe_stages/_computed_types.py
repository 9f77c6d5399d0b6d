"""Tell in which types a graph that ONNX Runtime has optimized computes each module's operators with weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vbpipe_stages import _onnx_graph
from vbpipe_stages._provenance import Provenance

if TYPE_CHECKING:
    import onnx

_INTEGER = frozenset(
    {
        "ConvInteger",
        "DynamicQuantizeMatMul",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "QAttention",
        "QGemm",
        "QLinearConv",
        "QLinearMatMul",
    }
)
"""Products of 8-bit values, whatever else is fused into them
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md)."""

_PLAIN = frozenset({"Attention", "Conv", "FusedConv", "FusedGemm", "FusedMatMul", "Gemm", "MatMul", "NhwcFusedConv"})
"""They compute in the type of their inputs."""

_PASSED = frozenset({"Cast", "DequantizeLinear", "ReorderInput", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""What may stand between a weight and the operator that reads it."""


def computed(directory: Path) -> Mapping[str, tuple[str, ...]]:
    """Return module to the types that its operators with weights compute in, as `Inspectable` names them.

    Args:
        directory: an artifact with a graph and its provenance; weights are not read.
    """
    import onnx

    model = onnx.load(str(directory / _onnx_graph.MODEL), load_external_data=False)
    provenance = Provenance.read(directory)
    graph = _Graph(model)
    found: dict[str, dict[str, None]] = {}
    for node in model.graph.node:
        kind = graph.kind_of(node)
        for module in provenance.modules_of(node.output[0]) if kind and node.output else ():
            found.setdefault(module, {})[kind] = None
    return {module: tuple(kinds) for module, kinds in found.items()}


class _Graph:
    def __init__(self, model: onnx.ModelProto) -> None:
        self._weights = {tensor.name: tensor for tensor in model.graph.initializer}
        self._makers = {name: node for node in model.graph.node for name in node.output if name}

    def kind_of(self, node: onnx.NodeProto) -> str:
        """Return the type that an operator with a weight computes in, "" for other operators."""
        if node.op_type in _INTEGER:
            return "int8" if any(self._weight(name) is not None for name in node.input) else ""
        if node.op_type == "MatMulNBits":
            return f"int{_onnx_graph.attributes(node).get('bits', 4)}"
        if node.op_type == "GatherBlockQuantized":
            return f"int{_onnx_graph.attributes(node).get('bits', 4)}"
        if node.op_type == "Gather":
            table = self._weights.get(node.input[0])
            return _type_name(table) if table is not None and len(table.dims) > 1 else ""
        if node.op_type not in _PLAIN:
            return ""
        found = (self._weight(name) for name in node.input[:2])
        return next((kind for kind in found if kind is not None), "")

    def _weight(self, name: str) -> str | None:
        """Return the type of the matrix that a tensor is, with "weights in float" where it is turned to float first."""
        turned = False
        while name in self._makers and self._makers[name].op_type in _PASSED:
            turned |= self._makers[name].op_type in ("Cast", "DequantizeLinear")
            name = self._makers[name].input[0]
        tensor = self._weights.get(name)
        if tensor is None or len(tensor.dims) < 2:
            return None
        kind = _type_name(tensor)
        return f"{kind} weights in float" if kind and turned else kind or None


def _type_name(tensor: onnx.TensorProto) -> str:
    """Return the name of a weight's type; "" for types that weights don't have, such as indices."""
    from onnx import TensorProto

    return {
        TensorProto.FLOAT: "float",
        TensorProto.DOUBLE: "float",
        TensorProto.FLOAT16: "fp16",
        TensorProto.BFLOAT16: "bf16",
        TensorProto.INT8: "int8",
        TensorProto.UINT8: "int8",
        TensorProto.INT4: "int4",
        TensorProto.UINT4: "int4",
        TensorProto.FLOAT8E4M3FN: "fp8",
    }.get(tensor.data_type, "")
