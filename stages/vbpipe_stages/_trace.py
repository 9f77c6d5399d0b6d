"""Carry provenance over a rewrite: which modules each node of the new graph stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vbpipe.core import TracedNode
from vbpipe_stages import _onnx_graph
from vbpipe_stages._provenance import Provenance

if TYPE_CHECKING:
    import onnx


def carried(
    provenance: Provenance,
    before: onnx.ModelProto,
    after: onnx.ModelProto,
    origins: Mapping[str, str] | None = None,
) -> Provenance:
    """Return the provenance of `after`, a rewrite of `before`.

    A node of `after` whose output `before` has too stands for all nodes of `before` between what it reads and that
    output: it belongs to the module of the output, and its `parts` are the modules of all of them. A node whose output
    is new gets what its neighbours have in common.

    Args:
        provenance: of `before`.
        before: the graph as it was.
        after: the graph as it is; tensors that stand for the same thing have kept their names.
        origins: new tensor to the tensor of `before` that it stands for, where the rewriter knows.
    """
    makers = {name: node for node in before.graph.node for name in node.output if name}
    places = {id(node): place for place, node in enumerate(before.graph.node)}
    known, stands_for = provenance.nodes, origins or {}
    readers = _onnx_graph.consumers(after.graph)
    alive = _Alive(makers, places, frozenset(name for node in after.graph.node for name in node.output if name))
    nodes: dict[str, str] = {}
    parts: dict[str, tuple[str, ...]] = {}
    for node in after.graph.node:
        if not node.output:
            continue
        output = node.output[0]
        absorbed = _modules(alive.between(node), provenance)
        if output in known:
            nodes[output] = known[output]
        elif stands_for.get(output) in known:
            nodes[output] = known[stands_for[output]]
        else:
            nodes[output] = _neighbourhood(node, known, readers)
        if len(absorbed) > 1:
            parts[output] = absorbed
    weights = {tensor.name for tensor in after.graph.initializer}
    parameters = {name: path for name, path in provenance.parameters.items() if name in weights}
    return Provenance(nodes=nodes, parts=parts, classes=provenance.classes, parameters=parameters)


def common(paths: Sequence[str]) -> str:
    """Return the module that holds all of `paths`: "a.b" for "a.b.c" and "a.b.d"."""
    if not paths:
        return ""
    shared: list[str] = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def read_nodes(directory: Path) -> tuple[TracedNode, ...]:
    """Return every node of an artifact's graph, in its order; weights stay on disk."""
    import onnx

    provenance = Provenance.read(directory)
    model = onnx.load(str(directory / _onnx_graph.MODEL), load_external_data=False)
    return tuple(
        TracedNode(node.output[0], _onnx_graph.operator(node), provenance.modules_of(node.output[0]))
        for node in model.graph.node
        if node.output
    )


@dataclass(frozen=True)
class _Alive:
    """The graph before a rewrite, and the tensors that are still made after it."""

    makers: Mapping[str, onnx.NodeProto]
    places: Mapping[int, int]
    made: frozenset[str]

    def between(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return the old nodes that `node` stands for, in the old order; none where its outputs are new."""
        waiting = [name for name in node.output if name in self.makers]
        stop = set(node.input)
        found: dict[int, onnx.NodeProto] = {}
        while waiting:
            name = waiting.pop()
            maker = self.makers.get(name)
            if maker is None or id(maker) in found:
                continue
            found[id(maker)] = maker
            waiting += [read for read in maker.input if read not in stop and read not in self.made]
        return sorted(found.values(), key=lambda maker: self.places[id(maker)])


def _modules(nodes: Sequence[onnx.NodeProto], provenance: Provenance) -> tuple[str, ...]:
    """Return the modules of `nodes`, less constants: a fold leaves none of them, whatever module once held them."""
    found = dict.fromkeys(
        module
        for node in nodes
        if node.output and node.op_type != "Constant"
        for module in provenance.modules_of(node.output[0])
        if module
    )
    return tuple(found)


def _neighbourhood(node: onnx.NodeProto, known: Mapping[str, str], readers: Mapping[str, list[onnx.NodeProto]]) -> str:
    around = [known[name] for name in node.input if name in known]
    if not around:
        after = readers.get(node.output[0], ())
        around = [known[reader.output[0]] for reader in after if reader.output and reader.output[0] in known]
    return common(around)
