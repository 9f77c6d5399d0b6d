"""Fuse operators of the exported graph without changing what it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic.json_schema import SkipJsonSchema

from vbpipe import fidelity, plugins, samples
from vbpipe.core import Inputs, Meta, Site, Spec, Stage
from vbpipe.errors import EngineError, VbpipeError
from vbpipe.recipe.model import Model, Recipe, Target
from vbpipe_stages import _onnx_graph
from vbpipe_stages._fuse_passes import LEVELS, PASSES, Level, Pass, PassName, Setting
from vbpipe_stages._interface import Interface
from vbpipe_stages._provenance import Provenance

if TYPE_CHECKING:
    import numpy as np
    import onnx

    Rows = Sequence[Mapping[str, np.ndarray]]

COSINE_FLOOR = 0.9999
"""A rewrite only reorders sums; one whose outputs differ by more is wrong and is not kept."""


class Fuse(Spec):
    """Fused operators make fewer passes over memory. Each pass is kept only where it is valid and gives equal outputs.

    basic: constants folded, redundant nodes dropped; standard operators only.
    extended: ONNX Runtime's fused operators as well, where the target runs them.
    all: and those for transformers (attention, skip normalization, biased activation).
    """

    name: ClassVar[str] = "fuse"
    version: ClassVar[int] = 1
    scope: ClassVar[Literal["chain", "each", "target"]] = "chain"
    after: ClassVar[tuple[str, ...]] = ("export",)
    in_recipe: ClassVar[bool] = True

    level: Level = "all"
    passes: tuple[PassName, ...] | None = None
    """Only these of the level's passes."""
    contrib: SkipJsonSchema[bool] = False
    """Whether the target runs `com.microsoft` operators; taken from its backend."""
    pack_attention: SkipJsonSchema[bool] = False
    """Whether Q, K and V become one tensor, which no rule of `quantize` could address; set where nothing quantizes."""

    @classmethod
    def configure(cls, recipe: Recipe, target: Target) -> tuple[Stage, ...]:
        backend = plugins.backend(target.backend)
        facts = {"contrib": backend.contrib_operators, "pack_attention": "quantize" not in recipe.stages}
        stage = cls.model_validate({**facts, **recipe.stages.get("fuse", {})})
        return (stage,) if backend.source == "onnx" and stage.level != "none" else ()

    def label(self) -> str:
        return self.name

    def consumes(self) -> frozenset[str]:
        return frozenset({"onnx"})

    def produces(self) -> str:
        return "onnx"

    def keeps(self) -> str:
        return "onnx"

    def fingerprint(self, root: Path) -> Mapping[str, str]:
        del root
        return {name: version(name) for name in ("onnx", "onnx-ir", "onnxscript")} | {"onnxruntime": _onnxruntime()}

    def run(self, inputs: Inputs, out: Path, site: Site) -> Meta:
        """Write the rewritten graph; meta says per pass what it fused, or why it was left out.

        Raises:
            VbpipeError: the exported graph itself does not run.
        """
        source = inputs["onnx"].path
        original = _onnx_graph.read(source)
        interface = Interface.read(source)
        rows = _probes(interface)
        expected = _outputs(original, interface, rows)
        model, reports = original, []
        wanted = self._wanted()
        for index, step in enumerate(wanted):
            site.progress(index / len(wanted), step.name)
            model, report = _attempt(step, model, self._setting(), interface, rows, expected)
            reports.append(report)
        _onnx_graph.write(model, out)
        interface.write(out)
        _carried(Provenance.read(source), model).write(out)
        changed = any(report.changed for report in reports)
        total = _added(_onnx_graph.operators(original), _onnx_graph.operators(model))
        return {
            "effect": "changed" if changed else "none",
            "nodes_before": len(original.graph.node),
            "nodes_after": len(model.graph.node),
            "fused": total,
            "attention": _attention(original, model),
            "passes": [asdict(report) for report in reports],
        }

    def _wanted(self) -> list[Pass]:
        return [
            step
            for step in PASSES
            if LEVELS[step.level] <= LEVELS[self.level]
            and (self.passes is None or step.name in self.passes)
            and (self.contrib or not step.contrib)
        ]

    def _setting(self) -> Setting:
        return Setting(contrib=self.contrib and self.level != "basic", pack_attention=self.pack_attention)


@dataclass(frozen=True)
class Report:
    """What one pass did: node counts around it, and operators that it added."""

    name: str
    before: int
    after: int
    fused: Mapping[str, int]
    changed: bool
    reason: str
    """Why its result was not kept, or what it did not find; empty otherwise."""


def _attempt(
    step: Pass, model: onnx.ModelProto, setting: Setting, interface: Interface, rows: Rows, expected: Rows
) -> tuple[onnx.ModelProto, Report]:
    """Return the graph after `step`, or the graph as it was with the reason."""
    before = _onnx_graph.operators(model)
    nodes = len(model.graph.node)
    try:
        rewritten = step.apply(model, setting)
        if _onnx_graph.operators(rewritten) == before:
            return model, Report(step.name, nodes, nodes, {}, changed=False, reason="it found nothing to change")
        _conform(rewritten, model)
        problem = _difference(_outputs(rewritten, interface, rows), expected)
    except Exception as error:  # noqa: BLE001  # a rewriter may raise anything on a graph it did not foresee; the step goes on without it
        problem = f"it failed: {type(error).__name__}: {str(error)[:300]}"
    if problem:
        return model, Report(step.name, nodes, nodes, {}, changed=False, reason=f"left out: {problem}")
    fused = _added(before, _onnx_graph.operators(rewritten))
    return rewritten, Report(step.name, nodes, len(rewritten.graph.node), fused, changed=True, reason="")


def _conform(rewritten: onnx.ModelProto, model: onnx.ModelProto) -> None:
    """Raise where inputs or outputs got other names, and drop shapes that a rewriter wrote down for tensors."""
    for kind in ("input", "output"):
        was = [value.name for value in getattr(model.graph, kind)]
        now = [value.name for value in getattr(rewritten.graph, kind)]
        if was != now:
            raise VbpipeError(f"its {kind}s were {was} and became {now}.")
    # Stale shapes make ONNX Runtime reuse buffers wrongly at other sizes; it infers its own.
    del rewritten.graph.value_info[:]


def _difference(outputs: Rows, expected: Rows) -> str | None:
    for got, want in zip(outputs, expected, strict=True):
        problem = fidelity.broken(got, want)
        if problem:
            return problem
    cosine = fidelity.compare(outputs, expected).cosine_min
    return None if cosine >= COSINE_FLOOR else f"its outputs differ from the graph's before it (cosine {cosine:.6f})"


def _probes(interface: Interface) -> Rows:
    """Return made-up samples at the sizes at which every step is checked; integers and masks are 0 or 1."""
    model = Model(factory="none:none", inputs=interface.inputs, outputs=interface.outputs, shapes=interface.shapes)
    sizes = samples.check_sizes(interface.shapes)
    return [samples.synthesize(model, at, seed) for seed, at in enumerate(sizes)]


def _outputs(model: onnx.ModelProto, interface: Interface, rows: Rows) -> Rows:
    """Return what the graph gives for `rows`, run without further rewrites."""
    import tempfile

    from vbpipe.core import Run

    backend = plugins.backend("onnxruntime")()
    reason = backend.unavailable()
    if reason:
        raise VbpipeError(reason, where="fuse")
    with tempfile.TemporaryDirectory() as folder:
        _onnx_graph.write(model, Path(folder))
        interface.write(Path(folder))
        run: Run
        try:
            with backend.open("engine", Path(folder), 1) as run:
                return [run(row) for row in rows]
        except EngineError as error:
            raise VbpipeError(error.what, where="fuse", hint=error.hint) from error


def _attention(original: onnx.ModelProto, model: onnx.ModelProto) -> dict[str, int]:
    """Return how many softmaxes there were, and how many of them are now part of an attention operator."""
    found, left = (sum(node.op_type == "Softmax" for node in graph.graph.node) for graph in (original, model))
    return {"softmax": found, "fused": found - left}


def _added(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return how many more there are of each operator that there are more of."""
    more = {name: count - before.get(name, 0) for name, count in after.items()}
    return {name: count for name, count in more.items() if count > 0}


def _carried(provenance: Provenance, model: onnx.ModelProto) -> Provenance:
    """Return the provenance of the rewritten graph.

    A fused node keeps the module of its output; one whose output is new gets what its neighbours have in common.
    """
    known = provenance.nodes
    readers = _onnx_graph.consumers(model.graph)
    nodes: dict[str, str] = {}
    for node in model.graph.node:
        if not node.output:
            continue
        output = node.output[0]
        around = [known[name] for name in node.input if name in known]
        around = around or [known[r.output[0]] for r in readers.get(output, ()) if r.output and r.output[0] in known]
        nodes[output] = known[output] if output in known else _common(around)
    weights = {tensor.name for tensor in model.graph.initializer}
    parameters = {name: path for name, path in provenance.parameters.items() if name in weights}
    return Provenance(nodes=nodes, classes=provenance.classes, parameters=parameters)


def _common(paths: Sequence[str]) -> str:
    """Return the module that holds all of `paths`: "a.b" for "a.b.c" and "a.b.d"."""
    if not paths:
        return ""
    shared: list[str] = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _onnxruntime() -> str:
    return plugins.backend("onnxruntime")().fingerprint()["onnxruntime"]


PLUGIN: type[Stage] = Fuse
