"""Keep the layers of a TensorRT network beside its plan, traced to modules, and tell in which types they compute."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vbpipe.core import TracedNode
from vbpipe_stages import _onnx_graph
from vbpipe_stages._provenance import Provenance

if TYPE_CHECKING:
    from vbpipe_stages._rtx_compile import Layer

FILE = "layers.json"

_PRODUCTS = ("matrix_multiply", "convolution", "gather")
_PASSED = ("shuffle", "cast", "identity", "unsqueeze", "squeeze", "constant", "dequantize", "quantize")
_TYPES = {"float": "float", "half": "fp16", "bf16": "bf16", "int8": "int8", "int4": "int4", "fp8": "fp8"}


def write(layers: Sequence[Layer], source: Path, out: Path) -> None:
    """Write `layers.json`: every layer with its types, and the modules of the node that it is from.

    Args:
        layers: of the network as parsed.
        source: the artifact with the graph that was parsed.
        out: the engine's directory.
    """
    import onnx

    model = onnx.load(str(source / _onnx_graph.MODEL), load_external_data=False)
    provenance = Provenance.read(source)
    outputs = {node.name: node.output[0] for node in model.graph.node if node.output}
    body = []
    for layer in layers:
        traced = outputs.get(layer.node) or next((name for name in layer.outputs if name in provenance.nodes), "")
        body.append({**layer.model_dump(mode="json"), "modules": list(provenance.modules_of(traced))})
    (out / FILE).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def nodes(directory: Path) -> tuple[TracedNode, ...]:
    """Return the layers that `write` kept."""
    return tuple(TracedNode(name, layer.kind, modules) for name, (layer, modules) in _read(directory).items())


def count_types(layers: Sequence[Layer]) -> dict[str, int]:
    """Return how many products there are in each type, and how many Q/DQ layers: "matrix_multiply half": 36."""
    counted: Counter[str] = Counter()
    for layer in layers:
        if layer.kind in ("matrix_multiply", "convolution"):
            counted[f"{layer.kind} {layer.dtypes[0]}"] += 1
        elif layer.kind in ("quantize", "dequantize"):
            counted[layer.kind] += 1
    return dict(sorted(counted.items()))


def precisions(directory: Path) -> Mapping[str, tuple[str, ...]]:
    """Return module to the types that its operators with weights compute in: the narrowest that a product reads."""
    found = _read(directory)
    makers = {name: layer for layer, _ in found.values() for name in layer.outputs}
    told: dict[str, dict[str, None]] = {}
    for layer, modules in found.values():
        if layer.kind not in _PRODUCTS:
            continue
        reads = [_weight(name, makers) for name in layer.inputs]
        kind = next((one for one in reads if one), None)
        if kind is None:
            continue
        for module in modules:
            told.setdefault(module, {})[kind] = None
    return {module: tuple(kinds) for module, kinds in told.items()}


def _weight(name: str, makers: Mapping[str, Layer]) -> str | None:
    """Return the type in which the constant behind a tensor is kept; None where there is no constant behind it."""
    while name in makers:
        layer = makers[name]
        if layer.kind == "constant":
            return _TYPES.get(layer.dtypes[0])
        if layer.kind not in _PASSED or not layer.inputs:
            return None
        name = layer.inputs[0]
    return None


def _read(directory: Path) -> dict[str, tuple[Layer, tuple[str, ...]]]:
    from vbpipe_stages._rtx_compile import Layer

    body = json.loads((directory / FILE).read_text(encoding="utf-8"))
    found = {}
    for entry in body:
        modules = tuple(entry.pop("modules"))
        layer = Layer.model_validate(entry)
        found[layer.name] = (layer, modules)
    return found
