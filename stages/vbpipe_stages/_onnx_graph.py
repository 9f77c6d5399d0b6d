"""Read, write and look at the ONNX graph in an artifact's directory."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vbpipe.errors import EngineError

if TYPE_CHECKING:
    import numpy as np
    import onnx

    Array = np.ndarray[Any, Any]

MODEL = "model.onnx"
DATA = "model.onnx.data"
INLINE_BYTES = 1_800_000_000
"""Larger graphs keep their weights in DATA: a protobuf message ends at 2 GiB."""


def read(directory: Path) -> onnx.ModelProto:
    """Return the graph with its weights in memory.

    Raises:
        EngineError: there is none, it can't be parsed, or its weights lie outside the directory.
    """
    import onnx
    from google.protobuf.message import DecodeError

    check_files(directory)
    try:
        return onnx.load(str(directory / MODEL))
    except (OSError, DecodeError, ValueError, onnx.checker.ValidationError) as error:
        raise EngineError(f"it is no ONNX graph ({_first_line(error)}).", where=str(directory / MODEL)) from error


def write(model: onnx.ModelProto, directory: Path) -> None:
    """Write the graph, bytes equal for equal graphs; weights go to DATA where one message can't hold them.

    `model` is left as it was.
    """
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    if _weight_bytes(copy) > INLINE_BYTES:
        onnx.external_data_helper.convert_model_to_external_data(copy, location=DATA, size_threshold=1024)
        onnx.save_model(copy, str(directory / MODEL))
    else:
        (directory / MODEL).write_bytes(copy.SerializeToString(deterministic=True))


def check_files(directory: Path) -> None:
    """Raise EngineError where a file of the graph is missing or is a link to something outside the artifact.

    ONNX Runtime and onnx refuse linked weights as well, later and with less to go on.
    """
    if not (directory / MODEL).is_file():
        raise EngineError(f"there is no {MODEL}.", where=str(directory), hint="Build the artifact again.")
    for path in (directory / MODEL, directory / DATA):
        if path.is_symlink():
            raise EngineError("it is a symbolic link.", where=str(path), hint="Copy the file in its place.")
    data = directory / DATA
    if data.exists() and data.stat().st_nlink > 1:
        raise EngineError("it is a hard link to another file.", where=str(data), hint="Copy the file in its place.")


def copy_files(source: Path, out: Path, names: Iterable[str]) -> None:
    """Copy those of the files `names` that exist; always real copies, never links."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


def operators(model: onnx.ModelProto) -> dict[str, int]:
    """Return how many nodes there are of each operator, sorted; those of other domains as "domain:Name"."""
    return dict(sorted(Counter(operator(node) for node in model.graph.node).items()))


def operator(node: onnx.NodeProto) -> str:
    """Return the operator's name, with its domain unless that is ONNX's own."""
    return f"{node.domain}:{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type


def opset(model: onnx.ModelProto) -> int:
    """Return the version of ONNX's own operators that the graph uses."""
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)


def consumers(graph: onnx.GraphProto) -> dict[str, list[onnx.NodeProto]]:
    """Return tensor to the nodes of the main graph that read it, in the order of the graph."""
    found: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in dict.fromkeys(filter(None, node.input)):
            found.setdefault(name, []).append(node)
    return found


def captured(graph: onnx.GraphProto) -> frozenset[str]:
    """Return the tensors that bodies of If, Loop and Scan read."""
    return frozenset(name for node in graph.node for body in _bodies(node) for name in _read_in(body))


def constants(graph: onnx.GraphProto) -> Mapping[str, onnx.TensorProto]:
    """Return name to weight: initializers, and Constant nodes that hold a tensor."""
    found = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            found.update((node.output[0], attribute.t) for attribute in node.attribute if attribute.name == "value")
    return found


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the node's attributes as Python values."""
    import onnx

    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def drop_unused(graph: onnx.GraphProto) -> None:
    """Remove weights that nothing reads, and nodes that only prepared them."""
    outputs = {value.name for value in graph.output}
    while True:
        read = set(_all_read(graph)) | outputs
        dead = [n for n in graph.node if n.op_type in ("Transpose", "Constant") and not set(n.output) & read]
        if not dead:
            break
        for node in dead:
            graph.node.remove(node)
    used = [tensor for tensor in graph.initializer if tensor.name in read]
    if len(used) < len(graph.initializer):
        del graph.initializer[:]
        graph.initializer.extend(used)


def _all_read(graph: onnx.GraphProto) -> Iterable[str]:
    for node in graph.node:
        yield from node.input
    yield from captured(graph)


def _weight_bytes(model: onnx.ModelProto) -> int:
    return sum(tensor.ByteSize() for tensor in model.graph.initializer)


def _bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _read_in(body: onnx.GraphProto) -> Iterator[str]:
    for node in body.node:
        yield from filter(None, node.input)
        for inner in _bodies(node):
            yield from _read_in(inner)
    yield from (output.name for output in body.output)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
