"""Write a graph of half types as one of float32 that rounds like it, for hosts that have no such kernels."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from vbpipe_stages import _onnx_graph
from vbpipe_stages._element_types import element_types

if TYPE_CHECKING:
    import onnx


def has_half(model: onnx.ModelProto) -> bool:
    """Return whether anything in the graph is fp16 or bf16."""
    return any(tensor.data_type in _halves() for tensor in model.graph.initializer) or any(
        attribute.i in _halves()
        for node in model.graph.node
        if node.op_type == "Cast"
        for attribute in node.attribute
        if attribute.name == "to"
    )


def computes_in_half(directory: Path) -> bool:
    """Return whether anything in an artifact's graph is fp16 or bf16; False without onnx, which hosts that run need not
    have. Reads no weights."""
    if importlib.util.find_spec("onnx") is None:
        return False
    import onnx

    return has_half(onnx.load(str(directory / _onnx_graph.MODEL), load_external_data=False))


def in_float(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Return the graph with every half tensor in float32, rounded to the half type wherever one is made.

    With it comes new tensor to the tensor of `model` that it stands for.

    So computes hardware that multiplies half types and sums up in float32, as tensor cores do; a half graph's own names
    are kept. Inputs and outputs of the graph that are half stay so.
    """
    import onnx

    if not has_half(model):
        return model, {}
    types = element_types(model)
    result = onnx.ModelProto()
    result.CopyFrom(model)
    nodes: list[onnx.NodeProto] = []
    origins: dict[str, str] = {}
    outside = {value.name for value in (*model.graph.input, *model.graph.output) if types.get(value.name) in _halves()}
    widened = {name: f"{name}__wide" for name in outside}
    for value in model.graph.input:
        if value.name in outside:
            nodes.append(_cast(value.name, widened[value.name], onnx.TensorProto.FLOAT))
    for node in model.graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        for place, name in enumerate(node.input):
            copy.input[place] = widened.get(name, name)
        if node.op_type == "Cast" and types.get(node.output[0]) in _halves():
            next(a for a in copy.attribute if a.name == "to").i = onnx.TensorProto.FLOAT
        nodes.append(copy)
        for place, name in enumerate(node.output):
            kind = types.get(name, 0)
            if kind not in _halves():
                continue
            exact, rounded = f"{name}__exact", f"{name}__rounded"
            copy.output[place] = exact
            target = name if name in outside else rounded
            origins |= {exact: name, rounded: name}
            nodes.append(_cast(exact, target, kind))
            nodes.append(_cast(target, widened.get(name, name), onnx.TensorProto.FLOAT))
    del result.graph.node[:]
    result.graph.node.extend(nodes)
    _widen_weights(result)
    del result.graph.value_info[:]
    return result, origins


def _widen_weights(model: onnx.ModelProto) -> None:
    import numpy as np
    import onnx

    for tensor in model.graph.initializer:
        if tensor.data_type in _halves():
            values = onnx.numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))


def _cast(source: str, target: str, kind: int) -> onnx.NodeProto:
    import onnx

    return onnx.helper.make_node("Cast", [source], [target], name=f"{target}/Round", to=kind)


def _halves() -> tuple[int, int]:
    import onnx

    return onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16
