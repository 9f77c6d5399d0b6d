"""Quantize the layers that a recipe asks for, each to its own precision, in one graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic.json_schema import SkipJsonSchema

from vbpipe import plugins, samples
from vbpipe.core import Dialect, Inputs, LayerChoice, Meta, Site, Spec, Stage
from vbpipe.errors import UsageError, VbpipeError
from vbpipe.recipe.model import Model, Recipe, Target
from vbpipe_stages import _onnx_graph, _processor
from vbpipe_stages._calibration import Extent, collect
from vbpipe_stages._damage import ModuleDamage, find_damage, worst_first, write_damage
from vbpipe_stages._half import Converted, in_half
from vbpipe_stages._interface import Interface
from vbpipe_stages._provenance import Provenance
from vbpipe_stages._quantize_forms import PROCESSOR, Form, Lowering
from vbpipe_stages._quantize_layers import WeightedModule, layer_choice, weighted_modules
from vbpipe_stages._quantize_lower import joined, lower, observed
from vbpipe_stages._quantize_plan import WHERE, Asked, Plan, fighting_rules, make_plan, place
from vbpipe_stages._quantize_rules import Choice, Precision, Rule, require_matches
from vbpipe_stages._simulate import in_float
from vbpipe_stages._trace import carried

if TYPE_CHECKING:
    import onnx

CALIBRATION, CHECKS = "calibration.safetensors", "check.safetensors"


class Quantize(Spec):
    """Only operators with a constant weight are quantized: MatMul and Gemm in every form, Conv in the static one.

    Everything between them stays in float: quantizing all operators of a transformer costs far more accuracy than it
    gains speed. An embedding's Gather is quantized where a rule names it by `op: Gather` or its class.
    """

    name: ClassVar[str] = "quantize"
    version: ClassVar[int] = 3
    scope: ClassVar[Literal["chain", "each", "target"]] = "chain"
    after: ClassVar[tuple[str, ...]] = ("export", "fuse")
    in_recipe: ClassVar[bool] = True

    default: Precision | Literal["keep"] = Precision()
    """What a node gets that no rule meets."""
    rules: tuple[Rule, ...] = ()
    """The first that meets a node decides."""
    dialect: SkipJsonSchema[Dialect] = "standard"
    """Which graphs the target takes; from its backend."""
    device: SkipJsonSchema[str | None] = None
    """See `Lowering`; from the target."""

    @classmethod
    def configure(cls, recipe: Recipe, target: Target) -> tuple[Stage, ...]:
        """Return the step; none where the recipe does not ask for it.

        Raises:
            UsageError: the target's backend reads no ONNX, or can't run a precision that is asked for; a rule can
                never decide.
        """
        backend = plugins.backend(target.backend)
        if "quantize" not in recipe.stages:
            return ()
        if backend.source != "onnx":
            raise UsageError(
                f"backend {target.backend!r} builds from {backend.source}, which this stage can't change.",
                where=WHERE,
                hint="Quantize for targets that build from ONNX, or leave this target out with --target.",
            )
        facts = {"dialect": backend.dialect, "device": _device(target)}
        stage = cls.model_validate({**facts, **recipe.stages["quantize"]})
        stage.refuse_impossible()
        return (stage,)

    def refuse_impossible(self) -> None:
        """Raise UsageError for what can be known to be wrong without the model."""
        fight = fighting_rules(self.rules)
        if fight:
            raise UsageError(f"{fight}.", where=f"{WHERE}.rules", hint="Put the narrower rule first, or remove it.")
        asked = self._asked()
        if self.default != "keep":
            asked.lowering.refuse(self.default, ("MatMul", "Conv"), place(None))
        for index, rule in enumerate(self.rules):
            if not rule.keep:
                ops = (rule.op,) if rule.op else ("MatMul", "Conv")
                asked.lowering.refuse(asked.over(index), ops, place(index))

    def _asked(self) -> Asked:
        return Asked(self.rules, self.default, Lowering(self.dialect, self.device))

    def label(self) -> str:
        return self.name

    def consumes(self) -> frozenset[str]:
        return frozenset({"onnx", "samples"})

    def produces(self) -> str:
        return "onnx"

    def fingerprint(self, root: Path) -> Mapping[str, str]:
        del root
        tools = {"onnx": version("onnx"), "numpy": version("numpy")}
        tools["onnxruntime"] = plugins.backend("onnxruntime")().fingerprint()["onnxruntime"]
        return {**tools, "int8_kernels": _processor.int8_kernels()} if self._depends_on_processor() else tools

    def layers(self, model: Model, root: Path) -> tuple[LayerChoice, ...]:
        """Return what becomes of every module with weights; operators are those that exporters write for its class.

        Raises:
            VbpipeError: the model can't be built, a rule meets none of its modules, or asks for what can't be had.
        """
        modules = weighted_modules(model, root)
        named = [rule for rule in self.rules if rule.op is None]
        require_matches(named, (), modules.classes)
        asked = self._asked()
        return tuple(layer_choice(module, self._choice_of(module), asked) for module in modules.weighted)

    def _choice_of(self, module: WeightedModule) -> Choice:
        """Return the first rule that the module meets as any of the operators that exporters may write for it."""
        asked = self._asked()
        found = [asked.choice(node) for node in module.described()]
        return min(found, key=lambda choice: len(self.rules) if choice.rule is None else choice.rule)

    def run(self, inputs: Inputs, out: Path, site: Site) -> Meta:
        """Write the quantized graph; meta counts what was asked and what was done.

        Raises:
            VbpipeError: a rule meets nothing, a node can't have what is asked for it, calibration fails, or nothing
                at all was quantized.
        """
        source = inputs["onnx"].path
        model, provenance = _onnx_graph.read(source), Provenance.read(source)
        plan = make_plan(model, provenance, self._asked())
        ends = joined(model, plan.forms, plan.kept_outputs())
        extents = self._extents(model, plan, ends, inputs, site)
        lowered = lower(model, plan.forms, plan.found, ends, extents)
        converted = in_half(lowered.model, plan.halves(lowered.model, lowered.high))
        if not plan.forms and not converted.nodes:
            raise VbpipeError("nothing was quantized: it would change nothing.", where=WHERE, hint=plan.why_nothing())
        _onnx_graph.write(converted.model, out)
        Interface.read(source).write(out)
        traced = carried(provenance, model, converted.model, _through(converted.origins, lowered.origins))
        traced.write(out)
        site.progress(None, "comparing module by module")
        rows = samples.load(inputs["samples"].path / CHECKS)
        computed, stands_for = in_float(converted.model)
        modules = {**traced.nodes, **{new: traced.nodes.get(old, "") for new, old in stands_for.items()}}
        damage = find_damage(model, computed, provenance, modules, rows)
        write_damage(damage, out)
        return {**_effect(plan, model, converted, len(extents), inputs), "damage": _most_damaged(damage)}

    def _depends_on_processor(self) -> bool:
        """Return whether another processor could give another graph: 8-bit weights whose range it decides."""
        precisions = [] if self.default == "keep" else [self.default]
        asked = self._asked()
        precisions += [asked.over(index) for index, rule in enumerate(self.rules) if not rule.keep]
        return self.device == PROCESSOR and any(p.weight == "int8" and not p.weight_only for p in precisions)

    def _extents(
        self, model: onnx.ModelProto, plan: Plan, ends: Mapping[str, Form], inputs: Inputs, site: Site
    ) -> dict[str, Extent]:
        wanted = observed(plan.forms, plan.found, ends)
        if not wanted:
            return {}
        path = inputs["samples"].path / CALIBRATION
        if not path.exists():
            raise VbpipeError(
                "static quantization needs calibration samples.",
                where=WHERE,
                hint="Set data.calibration in the recipe, or use `calibration: dynamic`.",
            )
        readers = {plan.found[output].data: plan.described[output].path for output in plan.forms}
        return collect(model, wanted, samples.load(path), readers, site)


def _effect(plan: Plan, model: onnx.ModelProto, converted: Converted, ranges: int, inputs: Inputs) -> Meta:
    candidates = [output for output in plan.choices if output in plan.found or output in plan.unfit]
    forms = [form for form in plan.forms.values() if form.kind != "half"]
    doubts = [_made_up(inputs) if ranges else None, plan.shared_weights()]
    return {
        "effect": "changed",
        "warning": "; ".join(filter(None, doubts)) or None,
        "asked": plan.told(),
        "modules": plan.precisions(),
        "changed": plan.counts(),
        "half_nodes": dict(sorted(converted.nodes.items())),
        "cut_constants": dict(sorted(converted.cut.items())),
        "quantized_nodes": len(plan.forms),
        "weighted_nodes": len(candidates),
        "kept": {plan.described[output].path or output: reason for output, reason in plan.kept.items()},
        "calibrated_tensors": ranges,
        "activations": sorted({form.activation for form in forms if form.kind == "static"}),
        "largest_weight": sorted({f.largest for f in forms if f.kind in ("static", "dynamic") and f.dtype == "int8"}),
        "opset": [_onnx_graph.opset(model), _onnx_graph.opset(converted.model)],
        "operators": _onnx_graph.operators(converted.model),
    }


def _device(target: Target) -> str | None:
    """Return where the target's engine runs, as `Lowering` names it."""
    if target.arch is not None:
        return target.arch
    if target.backend == "null":
        return None
    providers = target.options.get("providers", ())
    on_gpu = any(str(name).lower().startswith(("cuda", "tensorrt", "nvtensorrt", "rocm")) for name in providers)
    return "cuda" if on_gpu else PROCESSOR


def _through(later: Mapping[str, str], earlier: Mapping[str, str]) -> dict[str, str]:
    """Return new tensor to the first graph's tensor, over two rewrites."""
    return {**earlier, **{new: earlier.get(old, old) for new, old in later.items()}}


def _most_damaged(found: Sequence[ModuleDamage]) -> dict[str, float]:
    """Return the few modules that bring in most error, and its share of their output's power."""
    return {one.module: round(one.own or 0.0, 6) for one in worst_first(found)}


def _made_up(inputs: Inputs) -> str | None:
    if inputs["samples"].meta.get("calibration") != "made up":
        return None
    return "activation ranges come from made-up samples; name real ones in data.calibration."


PLUGIN: type[Stage] = Quantize
