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
from vbpipe_stages._patterns import CONTRIB, Fusion, compare_patterns
from vbpipe_stages._provenance import Provenance
from vbpipe_stages._trace import carried

if TYPE_CHECKING:
    import numpy as np
    import onnx

    Rows = Sequence[Mapping[str, np.ndarray]]

_EXPECTED = frozenset({"attention", "layer_norm", "rms_norm", "gelu", "rotary"})
"""Patterns that a model is slower without."""

COSINE_FLOOR = 0.9999
"""A rewrite only reorders sums; one whose outputs differ by more is wrong and is not kept."""


class Fuse(Spec):
    """Fused operators make fewer passes over memory. Each pass is kept only where it is valid and gives equal outputs.

    basic: constants folded, redundant nodes dropped; standard operators only.
    extended: ONNX Runtime's fused operators as well, where the target runs them.
    all: and those for transformers (attention, skip normalization, biased activation).
    """

    name: ClassVar[str] = "fuse"
    version: ClassVar[int] = 3
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
        facts = {"contrib": backend.dialect == "onnxruntime", "pack_attention": "quantize" not in recipe.stages}
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
        carried(Provenance.read(source), original, model).write(out)
        changed = any(report.changed for report in reports)
        fusions = compare_patterns(original, model, lambda pattern: self._why_apart(pattern, reports))
        total = _added(_onnx_graph.operators(original), _onnx_graph.operators(model))
        return {
            "effect": "changed" if changed else "none",
            "nodes_before": len(original.graph.node),
            "nodes_after": len(model.graph.node),
            "fused": total,
            "patterns": [asdict(fusion) for fusion in fusions],
            "note": "; ".join(f"{one.name} {one.fused} of {one.found} fused" for one in fusions),
            "warning": self._silent(fusions),
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

    def _why_apart(self, pattern: str, reports: Sequence[Report]) -> str:
        """Return why some of a pattern are still apart."""
        if pattern == "conv_activation":
            return "left to build, which merges them: here it would hide the weights from quantize"
        if pattern in CONTRIB and not self.contrib:
            return "the target runs ONNX's own operators only"
        if pattern in CONTRIB and self.level != "all":
            return f"level {self.level} does not look for it"
        refused = [f"pass {report.name} was {report.reason}" for report in reports if report.reason.startswith("left")]
        if refused:
            return "; ".join(refused)
        if self.passes is not None:
            return f"none of the passes asked for ({', '.join(self.passes)}) knows this form"
        return "no pass knows this form of it"

    def _silent(self, fusions: Sequence[Fusion]) -> str | None:
        """Return what a reader must not miss: a pattern that was asked for and not fused even once."""
        if self.level != "all" or self.passes is not None or not self.contrib:
            return None
        missed = [one for one in fusions if one.name in _EXPECTED and one.found and not one.fused]
        return "; ".join(f"none of {one.found} {one.name} was fused: {one.why}" for one in missed) or None

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


def _added(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return how many more there are of each operator that there are more of."""
    more = {name: count - before.get(name, 0) for name, count in after.items()}
    return {name: count for name, count in more.items() if count > 0}


def _onnxruntime() -> str:
    return plugins.backend("onnxruntime")().fingerprint()["onnxruntime"]


PLUGIN: type[Stage] = Fuse
