"""Count what fusion looks for: how often each pattern is in a graph, fused and not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vbpipe_stages import _onnx_graph

if TYPE_CHECKING:
    import onnx

_NORMS = frozenset({"LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization"})
_GELUS = frozenset({"Gelu", "FastGelu", "QuickGelu"})
_ACTIVATIONS = frozenset({"Relu", "Clip", "LeakyRelu", "Sigmoid", "Tanh", "HardSigmoid", "HardSwish"})
_REACH = 6
"""So many nodes may lie between the parts of attention: scale, mask, a guard against rows that see nothing."""


@dataclass(frozen=True)
class Pattern:
    """How often a pattern is in a graph: `fused` as one operator, `apart` as several."""

    name: str
    fused: int
    apart: int


@dataclass(frozen=True)
class Fusion:
    """What became of a pattern: there were `found`, `fused` of them are now one operator; `why` says why not all."""

    name: str
    found: int
    fused: int
    why: str = ""


def count_patterns(model: onnx.ModelProto) -> tuple[Pattern, ...]:
    """Return every pattern that occurs in the main graph."""
    graph = _Graph(model)
    counted = (
        Pattern(
            name,
            sum(node.op_type in operators for node in graph.nodes),
            sum(apart(graph, node) for node in graph.nodes),
        )
        for name, (operators, apart) in _PATTERNS.items()
    )
    return tuple(one for one in counted if one.fused or one.apart)


def compare_patterns(before: onnx.ModelProto, after: onnx.ModelProto, why: Callable[[str], str]) -> tuple[Fusion, ...]:
    """Return what a rewrite made of every pattern of `before`; `why` is asked for a reason by a pattern's name."""
    left = {one.name: one.apart for one in count_patterns(after)}
    found = []
    for one in count_patterns(before):
        apart = min(left.get(one.name, 0), one.fused + one.apart)
        found.append(
            Fusion(one.name, one.fused + one.apart, one.fused + one.apart - apart, why(one.name) if apart else "")
        )
    return tuple(found)


class _Graph:
    """A graph with its edges both ways."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.nodes = list(model.graph.node)
        self.makers = {name: node for node in self.nodes for name in node.output if name}
        self.readers = _onnx_graph.consumers(model.graph)
        self.weights = frozenset(_onnx_graph.constants(model.graph))

    def maker(self, node: onnx.NodeProto, place: int) -> onnx.NodeProto | None:
        """Return the node that makes an input of `node`."""
        return self.makers.get(node.input[place]) if place < len(node.input) else None

    def after(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return the nodes that read what `node` makes."""
        return [reader for name in node.output for reader in self.readers.get(name, [])]

    def reaches(self, node: onnx.NodeProto, wanted: frozenset[str], through: frozenset[str]) -> bool:
        """Return whether a wanted operator comes before `node`, a few nodes of kinds `through` at most between."""
        waiting = [(node, 0)]
        while waiting:
            here, depth = waiting.pop()
            for name in here.input:
                maker = self.makers.get(name)
                if maker is None or depth > _REACH:
                    continue
                if maker.op_type in wanted:
                    return True
                if maker.op_type in through:
                    waiting.append((maker, depth + 1))
        return False


def _attention(graph: _Graph, node: onnx.NodeProto) -> bool:
    """Softmax over a product whose result goes into another product."""
    between = frozenset({"Add", "Mul", "Div", "Where", "Cast", "Reshape", "Softcap", "Tanh"})
    if node.op_type != "Softmax" or not graph.reaches(node, frozenset({"MatMul", "FusedMatMul"}), between):
        return False
    waiting = [(node, 0)]
    while waiting:
        here, depth = waiting.pop()
        for reader in graph.after(here):
            if reader.op_type in ("MatMul", "FusedMatMul"):
                return True
            if reader.op_type in ("Where", "Cast", "IsNaN", "Reshape", "Dropout") and depth < _REACH:
                waiting.append((reader, depth + 1))
    return False


def _layer_norm(graph: _Graph, node: onnx.NodeProto) -> bool:
    """The mean of squares of what is left after subtracting the mean."""
    return node.op_type == "ReduceMean" and _is_centred(graph, _squared(graph, node))


def _rms_norm(graph: _Graph, node: onnx.NodeProto) -> bool:
    """The mean of squares of something that is not centred."""
    base = _squared(graph, node) if node.op_type == "ReduceMean" else None
    return base is not None and not _is_centred(graph, base)


def _squared(graph: _Graph, node: onnx.NodeProto) -> str | None:
    """Return the tensor whose squares `node` reads, None where it reads something else."""
    maker = graph.maker(node, 0)
    if maker is None:
        return None
    if maker.op_type == "Pow" or (maker.op_type == "Mul" and maker.input[0] == maker.input[1]):
        return str(maker.input[0])
    return None


def _is_centred(graph: _Graph, tensor: str | None) -> bool:
    maker = graph.makers.get(tensor or "")
    mean = graph.maker(maker, 1) if maker is not None and maker.op_type == "Sub" else None
    return mean is not None and mean.op_type == "ReduceMean"


def _skip_norm(graph: _Graph, node: onnx.NodeProto) -> bool:
    """A norm of a sum of two tensors, neither of them looked up."""
    return _norm_of_sum(graph, node) is not None and not _embedding_norm(graph, node)


def _embedding_norm(graph: _Graph, node: onnx.NodeProto) -> bool:
    """A norm of a sum of looked-up rows."""
    add = _norm_of_sum(graph, node)
    if add is None:
        return False
    makers = [graph.makers[name] for name in add.input if name in graph.makers]
    return bool(makers) and all(
        maker.op_type == "Gather"
        or (maker.op_type == "Add" and graph.reaches(maker, frozenset({"Gather"}), frozenset()))
        for maker in makers
    )


def _norm_of_sum(graph: _Graph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    maker = graph.maker(node, 0) if node.op_type in _NORMS else None
    if maker is None or maker.op_type != "Add" or any(name in graph.weights for name in maker.input):
        return None
    return maker


def _gelu(graph: _Graph, node: onnx.NodeProto) -> bool:
    return bool(node.op_type == "Erf")


def _bias_gelu(graph: _Graph, node: onnx.NodeProto) -> bool:
    maker = graph.maker(node, 0) if node.op_type in _GELUS and len(node.input) == 1 else None
    return maker is not None and maker.op_type == "Add" and any(name in graph.weights for name in maker.input)


def _conv_norm(graph: _Graph, node: onnx.NodeProto) -> bool:
    maker = graph.maker(node, 0) if node.op_type == "BatchNormalization" else None
    return maker is not None and maker.op_type in ("Conv", "ConvTranspose")


def _conv_activation(graph: _Graph, node: onnx.NodeProto) -> bool:
    maker = graph.maker(node, 0) if node.op_type in _ACTIVATIONS else None
    return maker is not None and maker.op_type == "Conv" and len(graph.after(maker)) == 1


def _rotary(graph: _Graph, node: onnx.NodeProto) -> bool:
    """Halves of a tensor changed over, one of them negated."""
    maker = graph.maker(node, 0) if node.op_type == "Concat" and len(node.input) == 2 else None
    return maker is not None and maker.op_type == "Neg"


CONTRIB = frozenset({"attention", "skip_norm", "embedding_norm", "bias_gelu"})
"""Patterns whose one operator is none of ONNX's own."""

_PATTERNS: Mapping[str, tuple[frozenset[str], Callable[[_Graph, onnx.NodeProto], bool]]] = {
    "attention": (
        frozenset({"Attention", "MultiHeadAttention", "GroupQueryAttention", "PackedMultiHeadAttention", "QAttention"}),
        _attention,
    ),
    "layer_norm": (frozenset({"LayerNormalization", "SkipLayerNormalization", "EmbedLayerNormalization"}), _layer_norm),
    "rms_norm": (
        frozenset({"RMSNormalization", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"}),
        _rms_norm,
    ),
    "skip_norm": (frozenset({"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}), _skip_norm),
    "embedding_norm": (frozenset({"EmbedLayerNormalization"}), _embedding_norm),
    "gelu": (frozenset({"Gelu", "FastGelu", "QuickGelu", "BiasGelu"}), _gelu),
    "bias_gelu": (frozenset({"BiasGelu"}), _bias_gelu),
    "rotary": (frozenset({"RotaryEmbedding"}), _rotary),
    "conv_norm": (frozenset(), _conv_norm),
    "conv_activation": (frozenset({"FusedConv"}), _conv_activation),
}
"""Pattern to the operators that are it, and a test for the node that is its mark where it is several nodes."""
