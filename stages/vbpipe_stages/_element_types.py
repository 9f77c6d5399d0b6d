"""Tell the element type of every tensor of a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

_LARGE = 1024


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    """Return tensor to its `TensorProto.DataType`, for tensors of the main graph.

    ONNX infers those of its own operators. Others, which it does not know, are taken to give the type of their first
    float input, or else of their first input.
    """
    import onnx

    known = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    known |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    inferred = onnx.shape_inference.infer_shapes(_without_weights(model))
    known |= {v.name: v.type.tensor_type.elem_type for v in inferred.graph.value_info if v.type.tensor_type.elem_type}
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    for node in model.graph.node:
        given = sorted((known[name] for name in node.input if known.get(name)), key=lambda kind: kind not in floats)
        for name in node.output:
            if name and not known.get(name) and given:
                known[name] = given[0]
    return {name: kind for name, kind in known.items() if kind}


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph with its large weights as inputs: inference copies the graph, and 2 GiB is its limit."""
    import onnx

    light = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    light.graph.node.extend(model.graph.node)
    light.graph.input.extend(model.graph.input)
    light.graph.output.extend(model.graph.output)
    for tensor in model.graph.initializer:
        if tensor.ByteSize() <= _LARGE:
            light.graph.initializer.append(tensor)
        else:
            light.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return light
