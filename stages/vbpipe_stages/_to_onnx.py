"""Export a flat PyTorch module to an ONNX graph that holds nothing of the machine that exported it."""

from __future__ import annotations

import ast
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vbpipe.errors import VbpipeError
from vbpipe.recipe.model import Model
from vbpipe_stages._provenance import Provenance
from vbpipe_stages._reference import ModuleRow
from vbpipe_stages._torch_model import PREFIX

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
_EXTERNAL_BYTES = int(1.8e9)
"""Weights above this go to their own file: one protobuf message ends at 2 GiB."""


_DYNAMO_OPSET = 18


@dataclass(frozen=True)
class Graph:
    """An exported model, cleaned, and where its parts come from."""

    model: ir.Model
    provenance: Provenance
    opset: int


def export_dynamo(
    adapter: torch.nn.Module, recipe: Model, tensors: Sequence[torch.Tensor], opset: int, modules: Sequence[ModuleRow]
) -> Graph:
    """Export through torch.export; raises what torch raises, and VbpipeError where a symbol became a constant."""
    import torch

    if opset < _DYNAMO_OPSET:
        # It converts its graph down, which loses where nodes come from, or leaves it as it is without a word.
        raise VbpipeError(f"torch.export gives opset {_DYNAMO_OPSET} or higher, not {opset}.")
    axes = _dynamic_axes(recipe)
    try:
        program = torch.onnx.export(
            adapter,
            tuple(tensors),
            dynamo=True,
            opset_version=opset,
            # Names are given below: the exporter does not see that "embedding" may be the name of a value inside.
            dynamic_shapes=(tuple(axes[name] for name in recipe.inputs),),
            optimize=True,
            verbose=False,
        )
    except torch.onnx.errors.OnnxExporterError as error:
        raise (error.__cause__ or error) from None  # its own message is advice about exporting; the cause says why
    assert program is not None
    _name_interface(program.model, recipe)
    scopes = {_output(node): _dynamo_scope(node.metadata_props) for node in program.model.graph.all_nodes()}
    return _finish(program.model, recipe, adapter, scopes, modules)


def export_torchscript(
    adapter: torch.nn.Module, recipe: Model, tensors: Sequence[torch.Tensor], opset: int, modules: Sequence[ModuleRow]
) -> Graph:
    """Export through tracing, or an already scripted `adapter`; raises what torch raises."""
    import onnx_ir as ir
    import torch

    highest = getattr(torch.onnx, "_constants", None)
    capped = min(opset, getattr(highest, "ONNX_TORCHSCRIPT_EXPORTER_MAX_OPSET", 20))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it deprecates itself on every call
        path = Path(folder) / FILE
        torch.onnx.export(
            adapter,
            tuple(tensors),
            str(path),
            dynamo=False,
            opset_version=capped,
            input_names=list(recipe.inputs),
            output_names=list(recipe.outputs),
            dynamic_axes={name: axes for name, axes in _dynamic_axes(recipe).items() if axes},
        )
        model = ir.load(path)
        ir.external_data.load_to_model(model)
    scopes = {_output(node): _torchscript_scope(node.name or "") for node in model.graph.all_nodes()}
    return _finish(model, recipe, adapter, scopes, modules)


def write(graph: Graph, out: Path) -> None:
    """Write `model.onnx`, `model.onnx.data` where weights are large, and `provenance.json`."""
    import onnx_ir as ir

    size = sum(value.const_value.nbytes for value in graph.model.graph.initializers.values() if value.const_value)
    ir.save(graph.model, out / FILE, external_data=DATA_FILE if size > _EXTERNAL_BYTES else None)
    graph.provenance.write(out)


def _dynamic_axes(recipe: Model) -> dict[str, dict[int, str]]:
    """Return input to axis to symbol, without symbols whose profile is one size."""

    def moves(symbol: int | str) -> bool:
        if isinstance(symbol, int):
            return False
        dim = recipe.shapes.get(symbol)
        return dim is None or dim.min < dim.max

    return {
        name: {axis: str(symbol) for axis, symbol in enumerate(spec.shape) if moves(symbol)}
        for name, spec in recipe.inputs.items()
    }


def _finish(
    model: ir.Model, recipe: Model, adapter: torch.nn.Module, scopes: Mapping[str, str], modules: Sequence[ModuleRow]
) -> Graph:
    _name_symbols(model, recipe)
    paths = {row.path for row in modules}
    nodes = {name: _known(scope, paths) for name, scope in scopes.items() if name}
    classes = {row.path: row.type for row in modules}
    parameters = dict(_parameters(model, adapter, nodes))
    folded = dict(_folded_norms(model, nodes, classes, parameters))
    provenance = Provenance(
        nodes={**nodes, **folded},
        parts={output: (owner, nodes[output]) for output, owner in folded.items()},
        classes=classes,
        parameters=parameters,
    )
    _strip(model)
    return Graph(model, provenance, model.opset_imports[""])


def _output(node: ir.Node) -> str:
    return node.outputs[0].name or ""


def _name_interface(model: ir.Model, recipe: Model) -> None:
    """Give the graph's inputs and outputs the recipe's names, and values inside that have those names others."""
    inputs, outputs = model.graph.inputs, model.graph.outputs
    if len(inputs) != len(recipe.inputs) or len(outputs) != len(recipe.outputs):
        raise VbpipeError(f"the graph has {len(inputs)} inputs and {len(outputs)} outputs.", where="model.inputs")
    _own_outputs(model.graph)
    wanted = {*recipe.inputs, *recipe.outputs}
    values = [*_values(model.graph), *model.graph.initializers.values()]
    taken = wanted | {value.name for value in values}
    for value in values:
        if value.name in wanted:
            # Also an input or an output that has another one's name: all of them are named next.
            value.name = next(n for n in (f"{value.name}_inner{i}" for i in range(len(values))) if n not in taken)
            taken.add(value.name)
    for value, name in zip((*inputs, *outputs), (*recipe.inputs, *recipe.outputs), strict=True):
        value.name = name


def _own_outputs(graph: ir.Graph) -> None:
    """Copy outputs that are an input, a weight or another output: each needs a name of its own."""
    import onnx_ir as ir

    seen = {id(value) for value in (*graph.inputs, *graph.initializers.values())}
    for index, value in enumerate(graph.outputs):
        if id(value) in seen:
            node = ir.node("Identity", [value])
            copy = node.outputs[0]
            copy.name, copy.type, copy.shape = f"{value.name}_output{index}", value.type, value.shape
            graph.append(node)
            graph.outputs[index] = copy
        seen.add(id(graph.outputs[index]))


def _name_symbols(model: ir.Model, recipe: Model) -> None:
    """Give every input axis its symbol's name, and other values the same names.

    Raises:
        VbpipeError: an axis that the recipe calls a symbol became a constant.
    """
    import onnx_ir as ir

    found = {value.name: value for value in model.graph.inputs}
    renamed: dict[str, str] = {}
    for name, axes in _dynamic_axes(recipe).items():
        if name not in found:
            raise VbpipeError(f"the graph does not use input {name!r}.", where="model.inputs", hint="Remove it.")
        shape = found[name].shape
        for axis, symbol in axes.items():
            dim = shape[axis] if shape is not None else symbol
            if isinstance(dim, int):
                raise VbpipeError(f"{symbol!r} became the constant {dim} (input {name!r}, axis {axis}).")
            renamed[str(getattr(dim, "value", dim))] = symbol
    for value in _values(model.graph):
        if value.shape is not None:
            dims = [renamed.get(str(d.value), d.value) if isinstance(d, ir.SymbolicDim) else d for d in value.shape]
            value.shape = ir.Shape(dims)


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph.all_nodes():
        yield from node.outputs


def _strip(model: ir.Model) -> None:
    """Remove stack traces, source paths, producer stamps and doc strings: equal models give equal bytes."""
    model.producer_name, model.producer_version, model.doc_string = "pytorch", None, None
    model.metadata_props.clear()
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        graph.doc_string = None
        graph.metadata_props.clear()
        for node in graph.all_nodes():
            node.doc_string = None
            node.metadata_props.clear()
        for value in (*_values(graph), *graph.initializers.values()):
            value.doc_string = None
            value.metadata_props.clear()
            if value.const_value is not None:
                value.const_value.metadata_props.clear()


def _dynamo_scope(props: Mapping[str, str]) -> str:
    """Return "model.layers.0" from the exporter's "['', 'model', 'model.layers.0', 'linear']"."""
    try:
        scopes = ast.literal_eval(props.get("pkg.torch.onnx.name_scopes", "[]"))
    except (SyntaxError, ValueError):
        return ""
    return str(scopes[-2]) if isinstance(scopes, list) and len(scopes) >= 2 else ""


def _torchscript_scope(name: str) -> str:
    """Return "model.layers.0" from a node called "/model/layers.0/MatMul_1"."""
    return ".".join(name.split("/")[1:-1])


def _known(scope: str, paths: set[str]) -> str:
    """Return the path of the recipe's own module that `scope` lies in."""
    parts = scope.split(".")[1:] if scope.split(".")[0] == PREFIX else []
    while parts and ".".join(parts) not in paths:
        # A module called again is "fc_1" to the TorchScript exporter, and "fc@1" to torch.export.
        again = parts[-1].split("@")[0]
        again = again if again != parts[-1] else again.rstrip("0123456789").removesuffix("_")
        if again and ".".join([*parts[:-1], again]) in paths:
            return ".".join([*parts[:-1], again])
        parts.pop()
    return ".".join(parts)


def _parameters(model: ir.Model, adapter: torch.nn.Module, nodes: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (initializer, parameter): by name, else by the bytes of a weight of the module that reads it."""
    tensors: dict[str, Any] = {
        **dict(adapter.named_parameters(remove_duplicate=False)),
        **dict(adapter.named_buffers()),
    }
    for name, value in model.graph.initializers.items():
        if name in tensors:
            yield name, name.removeprefix(f"{PREFIX}.")
            continue
        for user in value.consumers():
            inside = f"{PREFIX}.{nodes.get(user.outputs[0].name or '', '')}.".replace("..", ".")
            near = [key for key in tensors if key.startswith(inside) and "." not in key[len(inside) :]]
            match = next((key for key in near if _holds(value, tensors[key])), None)
            if match:
                yield name, match.removeprefix(f"{PREFIX}.")
                break


def _folded_norms(
    model: ir.Model, nodes: Mapping[str, str], classes: Mapping[str, str], parameters: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield (output, module) of operators that took over the norm behind them, with the module of their weight.

    The exporter names them after the norm, and nobody looks for a convolution there.
    """
    for node in model.graph.all_nodes():
        output, weight = _output(node), node.inputs[1].name if len(node.inputs) > 1 and node.inputs[1] else None
        owner = parameters.get(weight or "", "").rpartition(".")[0]
        if owner and owner != nodes.get(output) and "BatchNorm" in classes.get(nodes.get(output, ""), ""):
            yield output, owner


def _holds(value: ir.Value, tensor: torch.Tensor) -> bool:
    """Return whether an initializer has a parameter's values, as they are or transposed."""
    import numpy as np

    constant = value.const_value
    if constant is None or constant.size != tensor.numel() or tensor.ndim == 0:
        return False
    try:
        mine, theirs = constant.numpy(), tensor.detach().numpy()
    except TypeError:  # a type that numpy lacks
        return False
    return bool(np.array_equal(mine, theirs) or (tensor.ndim == 2 and np.array_equal(mine, theirs.T)))
