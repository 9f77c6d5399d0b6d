"""Let chosen nodes of a float32 graph compute in fp16 or bf16, with casts where they meet the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from vbpipe_stages import _onnx_graph
from vbpipe_stages._element_types import element_types

if TYPE_CHECKING:
    import onnx

Half = Literal["fp16", "bf16"]

ISLANDS = frozenset(
    {
        *("LayerNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization", "RMSNormalization"),
        *("SkipSimplifiedLayerNormalization", "EmbedLayerNormalization", "GroupNormalization"),
        *("InstanceNormalization", "BatchNormalization", "LpNormalization", "MeanVarianceNormalization"),
        *("Softmax", "LogSoftmax", "Exp", "Log", "Pow", "Sqrt", "Reciprocal", "CumSum"),
        *("ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceProd", "ReduceLogSumExp"),
    }
)
"""Operators that stay in float32: norms and softmax, and what exporters write them as. Squares and sums leave fp16's
range, and a norm's small variance its precision (P. Micikevicius et al., "Mixed precision training", 2018)."""

_OTHER = frozenset({"ConstantOfShape", "EyeLike", "Range", "RandomNormal", "RandomUniform", "Bernoulli", "Multinomial"})
"""Operators whose type is an attribute, or that have no half form."""
_UNTYPED = frozenset({"Shape", "Size"})
"""They take any type and give integers: no cast is worth it."""
_FLOAT_INPUTS: Mapping[str, frozenset[int]] = {"Resize": frozenset({1, 2}), "Upsample": frozenset({1})}
"""Inputs that are float32 whatever the operator computes in."""

_FP16_LARGEST = 65504.0
_FP16_LEAST = 2.0**-25
"""What rounds to zero."""
_INFINITE = 1e30
"""Constants of this magnitude stand for infinity."""
_STANDS_FOR_INFINITY = 32768.0
"""Masks hold the most negative float32 there is. This leaves room for the scores that are added to it."""


@dataclass(frozen=True)
class Converted:
    """A graph some of whose nodes compute in a half type.

    Args:
        model: the graph; its inputs and outputs are as they were.
        origins: new tensor to the old one that it stands for.
        nodes: how many compute in each type.
        cut: constants that stand for infinity and became +-32768 in fp16: name to the value of largest magnitude.
    """

    model: onnx.ModelProto
    origins: Mapping[str, str]
    nodes: Mapping[str, int]
    cut: Mapping[str, float]


def stays(node: onnx.NodeProto) -> bool:
    """Return whether a node computes in float32 even where it is asked for less."""
    return node.op_type in ISLANDS or node.op_type in _OTHER or any(a.HasField("g") or a.graphs for a in node.attribute)


def in_half(model: onnx.ModelProto, wanted: Mapping[str, Half]) -> Converted:
    """Return `model`, float32 so far, with the nodes in `wanted`, known by their first output, in their half type."""
    import onnx

    if not wanted:
        return Converted(model, {}, {}, {})
    result = onnx.ModelProto()
    result.CopyFrom(model)
    writer = _Writer(result, wanted, element_types(model))
    for node in model.graph.node:
        writer.write(node)
    writer.finish()
    return Converted(result, writer.origins, writer.counts, writer.cut)


@dataclass
class _Writer:
    """The graph being written. `forms` has each float tensor's name in each type that it has been cast to."""

    result: onnx.ModelProto
    wanted: Mapping[str, Half]
    types: Mapping[str, int]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    forms: dict[tuple[str, int], str] = field(default_factory=dict)
    made_in: dict[str, int] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    cut: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.result.graph
        self.weights = dict(_onnx_graph.constants(graph))
        self.fixed = {value.name for value in graph.output} | _onnx_graph.captured(graph)

    def write(self, node: onnx.NodeProto) -> None:
        """Write a node in its type, with what it reads in that type as well."""
        import onnx

        floats = onnx.TensorProto.FLOAT
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        output = node.output[0] if node.output else ""
        half = self.wanted.get(output)
        kind = _code(half) if half is not None and not stays(node) else floats
        if kind == onnx.TensorProto.FLOAT16 and any(self._is_beyond(name) for name in node.input):
            kind = floats
        if node.op_type == "Constant":
            self.nodes.append(copy)
            return
        if node.op_type == "QuantizeLinear":
            # Rounded as it is, so that nothing is lost before it and no cast stands in the way of fusing.
            kind = self.made_in.get(node.input[0], floats)
        if node.op_type == "Cast":
            self._write_cast(node, copy, kind)
            return
        makes = any(self.types.get(name) == floats for name in node.output)
        if node.op_type not in _UNTYPED:
            for place, name in enumerate(node.input):
                if self.types.get(name) == floats:
                    exact = place in _FLOAT_INPUTS.get(node.op_type, frozenset())
                    copy.input[place] = self._in(name, floats if exact else kind)
        self.nodes.append(copy)
        if makes:
            self._made(node, copy, kind)

    def finish(self) -> None:
        """Put the nodes in place, and drop weights that nobody reads any more."""
        del self.result.graph.node[:]
        self.result.graph.node.extend(self.nodes)
        del self.result.graph.value_info[:]
        _onnx_graph.drop_unused(self.result.graph)

    def _write_cast(self, node: onnx.NodeProto, copy: onnx.NodeProto, kind: int) -> None:
        """Cast from whatever the input is now; one to float32 gives the half type in its place."""
        import onnx

        self.nodes.append(copy)
        if self.types.get(node.output[0]) != onnx.TensorProto.FLOAT:
            return
        for attribute in copy.attribute:
            if attribute.name == "to":
                attribute.i = kind
        self._made(node, copy, kind)

    def _made(self, node: onnx.NodeProto, copy: onnx.NodeProto, kind: int) -> None:
        import onnx

        floats = onnx.TensorProto.FLOAT
        for place, name in enumerate(node.output):
            if not name or self.types.get(name) != floats:
                continue
            self.made_in[name] = kind
            if kind == floats or name not in self.fixed:
                self.forms[name, kind] = name
                continue
            # Who reads it from outside needs float32 under this name.
            copy.output[place] = f"{name}__{_name(kind)}"
            self.origins[copy.output[place]] = name
            self.forms[name, kind] = copy.output[place]
            self.nodes.append(
                onnx.helper.make_node("Cast", [copy.output[place]], [name], name=f"{name}/Cast", to=floats)
            )
            self.forms[name, floats] = name
        if kind != floats:
            self.counts[_name(kind)] = self.counts.get(_name(kind), 0) + 1

    def _in(self, name: str, kind: int) -> str:
        """Return the tensor that holds `name` in a type, made where there is none."""
        import onnx

        if (name, kind) in self.forms:
            return self.forms[name, kind]
        now = self.made_in.get(name, onnx.TensorProto.FLOAT)
        if now == kind:
            return name
        made = f"{name}__{_name(kind)}"
        if name in self.weights:
            self.result.graph.initializer.append(self._rounded(name, made, kind))
        else:
            source = self.forms.get((name, now), name)
            self.nodes.append(onnx.helper.make_node("Cast", [source], [made], name=f"{made}/Cast", to=kind))
        self.origins[made] = name
        self.forms[name, kind] = made
        return made

    def _is_beyond(self, name: str) -> bool:
        """Return whether fp16 can't hold a constant: a number that it rounds to zero guards a division."""
        import numpy as np
        import onnx

        tensor = self.weights.get(name)
        if tensor is None or tensor.data_type != onnx.TensorProto.FLOAT:
            return False
        sizes = np.abs(onnx.numpy_helper.to_array(tensor))
        vanishes = sizes.size == 1 and 0 < float(sizes.reshape(-1)[0]) < _FP16_LEAST
        return bool(vanishes or ((sizes > _FP16_LARGEST) & (sizes < _INFINITE)).any())

    def _rounded(self, name: str, made: str, kind: int) -> onnx.TensorProto:
        import ml_dtypes
        import numpy as np
        import onnx

        values = onnx.numpy_helper.to_array(self.weights[name])
        if kind == onnx.TensorProto.FLOAT16:
            beyond = np.isfinite(values) & (np.abs(values) > _FP16_LARGEST)
            if beyond.any():
                self.cut[name] = float(values[beyond][np.abs(values[beyond]).argmax()])
                values = np.where(beyond, np.copysign(np.float32(_STANDS_FOR_INFINITY), values), values)
        kinds = {onnx.TensorProto.FLOAT16: np.float16, onnx.TensorProto.BFLOAT16: ml_dtypes.bfloat16}
        rounded = values.astype(kinds[kind])
        return onnx.helper.make_tensor(made, kind, rounded.shape, rounded.tobytes(), raw=True)


def _code(half: Half) -> int:
    import onnx

    return int(onnx.TensorProto.FLOAT16 if half == "fp16" else onnx.TensorProto.BFLOAT16)


def _name(kind: int) -> str:
    import onnx

    return {onnx.TensorProto.FLOAT: "fp32", onnx.TensorProto.FLOAT16: "fp16", onnx.TensorProto.BFLOAT16: "bf16"}[kind]
