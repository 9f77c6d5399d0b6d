"""Fuse scaled dot products as the TorchScript exporter writes them, which no other pass knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vbpipe_stages import _onnx_graph

if TYPE_CHECKING:
    import onnx

_HEADS_FIRST = [0, 2, 1, 3]
_KEYS_LAST = [0, 2, 3, 1]


def fuse_attention(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph with `Softmax(s q k + mask) v` over heads as MultiHeadAttention, where all of it is found.

    Both factors may be scaled, as `torch.nn.functional.scaled_dot_product_attention` is exported, and rows that see
    nothing may be guarded against NaN. The operator: ONNX Runtime's ContribOperators.md, MultiHeadAttention.
    """
    import onnx
    import onnx_ir as ir
    from onnx_ir.passes import common

    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = _Graph(result)
    found = [one for one in map(graph.attention, model.graph.node) if one is not None]
    if not found:
        return result
    for one in found:
        graph.replace(one)
    fused = ir.from_proto(result)
    common.RemoveUnusedNodesPass()(fused)
    return ir.to_proto(fused)


@dataclass(frozen=True)
class _Attention:
    """What MultiHeadAttention needs: three [batch, length, width] tensors, the mask, and where its result goes."""

    query: str
    key: str
    value: str
    mask: str
    heads: int
    scale: float
    end: onnx.NodeProto


class _Graph:
    """A graph with its edges, changed in place."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.makers = {name: node for node in model.graph.node for name in node.output if name}
        self.readers = _onnx_graph.consumers(model.graph)
        self.weights = _onnx_graph.constants(model.graph)

    def attention(self, softmax: onnx.NodeProto) -> _Attention | None:
        """Return the attention whose weights a Softmax gives, None where a part of it has another form."""
        if softmax.op_type != "Softmax" or _onnx_graph.attributes(softmax).get("axis", -1) not in (-1, 3):
            return None
        add = self._maker(softmax.input[0], "Add")
        product = self._maker(add.input[0], "MatMul") if add is not None else None
        end = self._end(softmax)
        if add is None or product is None or end is None:
            return None
        values, reshape = end
        query, key = self._heads(product.input[0], _HEADS_FIRST), self._heads(product.input[1], _KEYS_LAST)
        value = self._heads(values.input[1], _HEADS_FIRST)
        if query is None or key is None or value is None or value[1] != 1.0:
            return None
        heads = self._count(query[0])
        if heads is None or self._count(key[0]) != heads or self._count(value[0]) != heads:
            return None
        return _Attention(
            query[0].input[0], key[0].input[0], value[0].input[0], add.input[1], heads, query[1] * key[1], reshape
        )

    def replace(self, found: _Attention) -> None:
        """Put the one operator where the result was made; what it stands for is left without readers."""
        import onnx

        nodes = self.model.graph.node
        output = found.end.output[0]
        fused = onnx.helper.make_node(
            "MultiHeadAttention",
            [found.query, found.key, found.value, "", "", found.mask],
            [output],
            name=f"{output}/MultiHeadAttention",
            domain="com.microsoft",
            num_heads=found.heads,
            scale=found.scale,
        )
        place = next(index for index, node in enumerate(nodes) if node.output[:1] == [output])
        nodes.remove(found.end)
        nodes.insert(place, fused)
        if all(entry.domain != "com.microsoft" for entry in self.model.opset_import):
            self.model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))

    def _maker(self, name: str, op: str) -> onnx.NodeProto | None:
        node = self.makers.get(name)
        return node if node is not None and node.op_type == op else None

    def _only_reader(self, node: onnx.NodeProto, op: str) -> onnx.NodeProto | None:
        found = [reader for reader in self.readers.get(node.output[0], []) if reader.op_type == op]
        return found[0] if len(found) == 1 else None

    def _end(self, softmax: onnx.NodeProto) -> tuple[onnx.NodeProto, onnx.NodeProto] | None:
        """Return the product with the values, and the Reshape that joins the heads again."""
        weights = self._only_reader(softmax, "Where") or softmax
        if weights is not softmax and self._only_reader(softmax, "IsNaN") is None:
            return None
        values = self._only_reader(weights, "MatMul")
        if values is None:
            return None
        # The exporter spells out the shape that the result has anyway.
        spelled = self._only_reader(values, "Reshape")
        turned = self._only_reader(spelled or values, "Transpose")
        if turned is None or _onnx_graph.attributes(turned).get("perm") != _HEADS_FIRST:
            return None
        reshape = self._only_reader(turned, "Reshape")
        return (values, reshape) if reshape is not None else None

    def _heads(self, name: str, order: list[int]) -> tuple[onnx.NodeProto, float] | None:
        """Return the Reshape that splits heads in front of a Transpose, and the factor by which it is scaled behind."""
        scale, scaled = 1.0, self._maker(name, "Mul")
        if scaled is not None:
            factor = self._number(scaled.input[1])
            if factor is None:
                return None
            scale, name = factor, scaled.input[0]
        turned = self._maker(name, "Transpose")
        if turned is None or _onnx_graph.attributes(turned).get("perm") != order:
            return None
        split = self._maker(turned.input[0], "Reshape")
        return (split, scale) if split is not None else None

    def _count(self, split: onnx.NodeProto) -> int | None:
        """Return how many heads a Reshape gives: the width in front of it over the size of a head."""
        made = self.makers.get(split.input[0])
        width = None
        for name in made.input if made is not None else ():
            if name in self.weights and self.weights[name].dims:
                width = self.weights[name].dims[-1]
        size = self._last(split.input[1])
        return None if not width or not size or size < 0 or width % size else width // size

    def _last(self, shape: str) -> int | None:
        from onnx import numpy_helper

        joined = self._maker(shape, "Concat")
        name = joined.input[-1] if joined is not None else shape
        tensor = self.weights.get(name)
        return int(numpy_helper.to_array(tensor).reshape(-1)[-1]) if tensor is not None else None

    def _number(self, name: str) -> float | None:
        from onnx import numpy_helper

        tensor = self.weights.get(name)
        values = [] if tensor is None else numpy_helper.to_array(tensor).reshape(-1).tolist()
        return float(values[0]) if len(values) == 1 else None
