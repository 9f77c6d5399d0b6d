"""Tell the element type of every tensor of a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

_LARGE = 1024


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    """Return tensor to its `TensorProto.DataType`, for tensors of the main graph.

    ONNX infers those of its own operators. For others, which it does not know, the first output is taken to have the
    type of the first input that has a type.
    """
    import onnx

    known = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    known |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    inferred = onnx.shape_inference.infer_shapes(_without_weights(model))
    known |= {v.name: v.type.tensor_type.elem_type for v in inferred.graph.value_info if v.type.tensor_type.elem_type}
    for node in model.graph.node:
        given = next((known[name] for name in node.input if known.get(name)), 0)
        for name in node.output:
            if name and not known.get(name) and given:
                known[name] = given
    return {name: kind for name, kind in known.items() if kind}


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph with large weights turned into inputs: inference copies the graph, and 2 GiB is its limit."""
    import onnx

    light = onnx.ModelProto()
    light.CopyFrom(model)
    del light.graph.value_info[:]
    kept = []
    for tensor in light.graph.initializer:
        if tensor.ByteSize() <= _LARGE:
            kept.append(tensor)
        else:
            light.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    copies = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in kept]
    del light.graph.initializer[:]
    light.graph.initializer.extend(copies)
    return light
