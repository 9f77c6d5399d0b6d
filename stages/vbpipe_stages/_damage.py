"""Say in which modules a quantized graph leaves the float graph that it was made from."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vbpipe.fidelity import EXACT_DB
from vbpipe_stages import _onnx_graph
from vbpipe_stages._provenance import Provenance
from vbpipe_stages._watched import watched

if TYPE_CHECKING:
    import numpy as np
    import onnx

    Array = np.ndarray[Any, Any]

FILE = "damage.json"
_NAMED = 3
_ASIDE = "quantized::"
_ALL = 1e9
"""Stands for an error without bounds: JSON has no infinity."""

_Power = tuple[float, float]
"""Of a tensor's signal and of its error."""


@dataclass(frozen=True)
class ModuleDamage:
    """How far a module's output is from what it is in the float graph, over all samples.

    `sqnr_db` is 10*log10(signal power / error power) in the quantized graph: what the module was given counts as well
    as what it does. `own` is error power / signal power where everything that the module reads is exact, 0.02 being
    2 %; None where that can't be told.
    """

    module: str
    sqnr_db: float
    own: float | None


def find_damage(
    model: onnx.ModelProto,
    quantized: onnx.ModelProto,
    provenance: Provenance,
    modules: Mapping[str, str],
    rows: Sequence[Mapping[str, Array]],
) -> tuple[ModuleDamage, ...]:
    """Run both graphs on `rows` and compare the last tensor of every module, in the order of the graph.

    Both are computed as ONNX defines their operators, not as this processor's fused kernels would.

    Args:
        model: the float graph.
        quantized: made from it; tensors that stand for the same thing have the same name.
        provenance: of `model`.
        modules: tensor of `quantized` to its module, like `Provenance.nodes`.
        rows: input name to array.
    """
    ends = _ends(model, quantized, provenance)
    alone = None if _onnx_graph.captured(quantized.graph) else _beside(model, quantized, provenance, modules)
    reached, own = _powers(alone or model, quantized, list(ends.values()), rows, own=alone is not None)
    return tuple(
        ModuleDamage(module, _decibel(*reached[tensor]), _share(*own[tensor]) if tensor in own else None)
        for module, tensor in ends.items()
        if tensor in reached
    )


def write_damage(found: Sequence[ModuleDamage], directory: Path) -> None:
    """Write `damage.json` into an artifact's directory."""
    body = [
        {"module": one.module, "sqnr_db": round(one.sqnr_db, 2), "own": None if one.own is None else round(one.own, 6)}
        for one in found
    ]
    (directory / FILE).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def read_damage(directory: Path) -> tuple[ModuleDamage, ...]:
    """Read what `write_damage` wrote; empty where there is none."""
    path = directory / FILE
    if not path.exists():
        return ()
    return tuple(ModuleDamage(**one) for one in json.loads(path.read_text(encoding="utf-8")))


def first_below(found: Sequence[ModuleDamage], sqnr_db: float) -> ModuleDamage | None:
    """Return the first module, in the order of the graph, whose output is worse than that."""
    return next((one for one in found if one.sqnr_db < sqnr_db), None)


def worst_first(found: Sequence[ModuleDamage]) -> list[ModuleDamage]:
    """Return the few modules that bring in most error themselves, the worst first."""
    return sorted((one for one in found if one.own), key=lambda one: -(one.own or 0.0))[:_NAMED]


def describe_damage(found: Sequence[ModuleDamage], sqnr_db: float) -> str:
    """Return where a graph first leaves a tolerance, which modules lose most, and the rules that would keep these."""
    first = first_below(found, sqnr_db)
    worst = worst_first(found)
    said = []
    if first is not None:
        said.append(f"the first module below {sqnr_db:.1f} dB is {first.module} ({first.sqnr_db:.1f} dB).")
    if worst:
        losses = ", ".join(f"{one.module} ({one.own:.2%} of its output's power)" for one in worst)
        keep = list(dict.fromkeys([*([first.module] if first else []), *(one.module for one in worst)]))
        rules = ", ".join(f"{{match: {name!r}, keep: true}}" for name in keep)
        said.append(f"Most error comes from {losses}. To keep them: stages.quantize.rules: [{rules}]")
    return " ".join(said)


def tolerance_db(cosine: float) -> float:
    """Return the SQNR of an independent error that leaves this cosine: c^2 / (1 - c^2) as powers."""
    if cosine >= 1:
        return EXACT_DB
    return 10 * math.log10(cosine**2 / (1 - cosine**2)) if cosine > 0 else -EXACT_DB


def _ends(model: onnx.ModelProto, quantized: onnx.ModelProto, provenance: Provenance) -> dict[str, str]:
    """Return module to the last tensor of it that both graphs have, in the order of these tensors."""
    made, ends = _made(quantized), dict[str, str]()
    for node in model.graph.node:
        output = node.output[0] if node.output else ""
        module = provenance.nodes.get(output)
        if module and output in made:
            ends.pop(module, None)
            ends[module] = output
    return ends


def _made(model: onnx.ModelProto) -> set[str]:
    return {name for node in model.graph.node for name in node.output if name}


def _beside(
    model: onnx.ModelProto, quantized: onnx.ModelProto, provenance: Provenance, modules: Mapping[str, str]
) -> onnx.ModelProto:
    """Return the float graph with the quantized one beside it, each of whose modules reads the float graph's tensors.

    Tensors of the quantized graph get a prefix. A node of it reads a float tensor where both graphs have that one and
    another module makes it, so that no error passes from module to module.
    """
    import onnx

    both = onnx.ModelProto()
    both.CopyFrom(model)
    shared = _made(model)
    aside = _made(quantized) | {tensor.name for tensor in quantized.graph.initializer}
    for node in quantized.graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = _ASIDE + (node.name or node.output[0])
        module = modules.get(node.output[0], "")
        for place, name in enumerate(node.input):
            foreign = name in shared and provenance.nodes.get(name, "") != module
            copy.input[place] = _ASIDE + name if name in aside and not foreign else name
        for place, name in enumerate(node.output):
            copy.output[place] = _ASIDE + name if name else name
        both.graph.node.append(copy)
    for tensor in quantized.graph.initializer:
        weight = both.graph.initializer.add()
        weight.CopyFrom(tensor)
        weight.name = _ASIDE + tensor.name
    del both.graph.value_info[:]
    versions = {entry.domain: entry.version for entry in model.opset_import}
    for entry in quantized.opset_import:
        versions[entry.domain] = max(entry.version, versions.get(entry.domain, 0))
    del both.opset_import[:]
    both.opset_import.extend(onnx.helper.make_opsetid(domain, number) for domain, number in versions.items())
    both.ir_version = max(model.ir_version, quantized.ir_version)
    return both


def _powers(
    exact: onnx.ModelProto,
    quantized: onnx.ModelProto,
    tensors: Sequence[str],
    rows: Sequence[Mapping[str, Array]],
    *,
    own: bool,
) -> tuple[dict[str, _Power], dict[str, _Power]]:
    """Return tensor to the powers of its signal and of its error in `quantized`, and, with `own`, beside `exact`."""
    reached: dict[str, _Power] = {}
    alone: dict[str, _Power] = {}
    aside = [_ASIDE + name for name in tensors] if own else []
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        wanted = watched(exact, [*tensors, *aside], Path(one), rewrite=False)
        given = watched(quantized, tensors, Path(other), rewrite=False)
        for row in rows:
            values = _values(wanted, [*tensors, *aside], row)
            wants, beside = values[: len(tensors)], values[len(tensors) :]
            _add(reached, tensors, wants, _values(given, tensors, row))
            if own:
                _add(alone, tensors, wants, beside)
    return reached, alone


def _add(powers: dict[str, _Power], tensors: Sequence[str], wants: Sequence[Array], gots: Sequence[Array]) -> None:
    """Add a row's powers; tensors that are no floating point numbers are left out."""
    import numpy as np

    for name, want, got in zip(tensors, wants, gots, strict=True):
        if want.dtype.kind != "f" or got.shape != want.shape:
            continue
        wide = want.astype(np.float64)
        error = got.astype(np.float64) - wide
        signal, noise = powers.get(name, (0.0, 0.0))
        powers[name] = (signal + float((wide * wide).sum()), noise + float((error * error).sum()))


def _values(session: Any, tensors: Sequence[str], row: Mapping[str, Array]) -> list[Array]:
    taken = [value.name for value in session.get_inputs()]
    values: list[Array] = session.run(list(tensors), {name: row[name] for name in taken})
    return values


def _decibel(signal: float, noise: float) -> float:
    if noise == 0:
        return EXACT_DB
    if not math.isfinite(noise) or signal == 0:
        return -EXACT_DB
    return 10 * math.log10(signal / noise)


def _share(signal: float, noise: float) -> float:
    if noise == 0:
        return 0.0
    return noise / signal if signal > 0 and math.isfinite(noise) else _ALL
