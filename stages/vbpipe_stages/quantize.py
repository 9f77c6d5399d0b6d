"""Quantize the layers that a recipe asks for, each to its own precision, in one graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import ValidationError
from pydantic.json_schema import SkipJsonSchema

from vbpipe import plugins, samples
from vbpipe.core import Inputs, LayerChoice, Meta, Site, Spec, Stage
from vbpipe.errors import UsageError, VbpipeError
from vbpipe.recipe.model import Model, Recipe, Target
from vbpipe_stages import _onnx_graph, _processor
from vbpipe_stages._calibration import Extent, Method, collect
from vbpipe_stages._damage import ModuleDamage, find_damage, worst_first, write_damage
from vbpipe_stages._interface import Interface
from vbpipe_stages._provenance import Provenance
from vbpipe_stages._quantize_forms import Form, joined, lower, observed
from vbpipe_stages._quantize_layers import WeightedModule, layer_choice, weighted_modules
from vbpipe_stages._quantize_rules import Choice, Described, Precision, Rule, choose, misfit, require_matches
from vbpipe_stages._quantize_weights import SEVEN_BITS
from vbpipe_stages._trace import carried
from vbpipe_stages._weighted_nodes import Weighted, weighted

if TYPE_CHECKING:
    import onnx

CALIBRATION, CHECKS = "calibration.safetensors", "check.safetensors"
_WHERE = "stages.quantize"


class Quantize(Spec):
    """Only operators with a constant weight are quantized: MatMul and Gemm in every form, Conv in the static one.

    Everything between them stays in float: quantizing all operators of a transformer costs far more accuracy than it
    gains speed. An embedding's Gather is quantized where a rule names it by `op: Gather` or its class.
    """

    name: ClassVar[str] = "quantize"
    version: ClassVar[int] = 2
    scope: ClassVar[Literal["chain", "each", "target"]] = "chain"
    after: ClassVar[tuple[str, ...]] = ("export", "fuse")
    in_recipe: ClassVar[bool] = True

    default: Precision | Literal["keep"] = Precision()
    """What a node gets that no rule meets."""
    rules: tuple[Rule, ...] = ()
    """The first that meets a node decides."""
    contrib: SkipJsonSchema[bool] = False
    """Whether the target runs `com.microsoft` operators; taken from its backend."""
    on_processor: SkipJsonSchema[bool] = False
    """Whether the target is a processor like this host's; taken from the target."""

    @classmethod
    def configure(cls, recipe: Recipe, target: Target) -> tuple[Stage, ...]:
        """Return the step; none where the recipe does not ask for it, or the target's backend reads no ONNX."""
        backend = plugins.backend(target.backend)
        if "quantize" not in recipe.stages:
            return ()
        if backend.source != "onnx":
            raise UsageError(
                f"backend {target.backend!r} builds from {backend.source}, which this stage can't change.",
                where=_WHERE,
                hint="Quantize for targets that build from ONNX, or leave this target out with --target.",
            )
        facts = {"contrib": backend.contrib_operators, "on_processor": _on_processor(target)}
        return (cls.model_validate({**facts, **recipe.stages["quantize"]}),)

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
        return tuple(
            layer_choice(module, self._choice_of(module), self.rules, self._form) for module in modules.weighted
        )

    def _choice_of(self, module: WeightedModule) -> Choice:
        """Return the first rule that the module meets as any of the operators that exporters may write for it."""
        found = [self._choice(node) for node in module.described()]
        return min(found, key=lambda choice: len(self.rules) if choice.rule is None else choice.rule)

    def run(self, inputs: Inputs, out: Path, site: Site) -> Meta:
        """Write the quantized graph; meta counts what was asked and what was done.

        Raises:
            VbpipeError: a rule meets nothing, a node can't have what is asked for it, calibration fails, or nothing
                at all was quantized.
        """
        source = inputs["onnx"].path
        model, provenance = _onnx_graph.read(source), Provenance.read(source)
        plan = self._plan(model, provenance)
        if not plan.forms:
            raise VbpipeError("nothing was quantized: it would change nothing.", where=_WHERE, hint=plan.why_nothing())
        ends = joined(model, plan.forms, plan.kept_outputs())
        extents = self._extents(model, plan, ends, inputs, site)
        quantized, origins = lower(model, plan.forms, plan.found, ends, extents)
        _onnx_graph.write(quantized, out)
        Interface.read(source).write(out)
        traced = carried(provenance, model, quantized, origins)
        traced.write(out)
        site.progress(None, "comparing module by module")
        rows = samples.load(inputs["samples"].path / CHECKS)
        damage = find_damage(model, quantized, provenance, traced.nodes, rows)
        write_damage(damage, out)
        return {**self._effect(plan, model, quantized, len(extents), inputs), "damage": _most_damaged(damage)}

    def _plan(self, model: onnx.ModelProto, provenance: Provenance) -> _Plan:
        """Decide for every node; raises VbpipeError for what can't be had."""
        found, unfit = weighted(model)
        described = {
            node.output[0]: _described(node, provenance) for node in model.graph.node if node.output and node.output[0]
        }
        require_matches(self.rules, described.values(), provenance.classes)
        plan = _Plan(found=found, unfit=unfit, described=described, forms={}, choices={}, kept={})
        for output in described:
            self._decide(output, plan)
        self._require_use(plan)
        return plan

    def _decide(self, output: str, plan: _Plan) -> None:
        node = plan.described[output]
        choice = self._choice(node)
        asked_gather = choice.rule is not None and self.rules[choice.rule].names_table(node)
        if output not in plan.found and output not in plan.unfit:
            if choice.rule is not None:
                plan.choices[output] = choice
            return
        if node.op == "Gather" and not asked_gather:
            return
        plan.choices[output] = choice
        if choice.precision is None:
            return
        problem = plan.unfit.get(output) or misfit(choice.precision, node.op, plan.found[output].weight.shape[0])
        if not problem:
            plan.forms[output] = self._form(choice.precision, node, choice.rule)
        elif choice.rule is None and (node.op == "Conv" or output in plan.unfit):
            plan.kept[output] = problem
        else:
            raise VbpipeError(
                f"{node.path or output} ({node.op}) can't be quantized as asked: {problem}.",
                where=_place(choice.rule),
                hint=f"Change it, or keep the module: rules: [{{match: {node.path or '…'!r}, keep: true}}].",
            )

    def _choice(self, node: Described) -> Choice:
        default = Precision() if self.default == "keep" else self.default
        try:
            choice = choose(node, self.rules, default)
        except ValidationError as error:
            found = "; ".join(str(entry["msg"]) for entry in error.errors())
            raise VbpipeError(
                f"a rule and the default make no sense together: {found}.", where=f"{_WHERE}.rules"
            ) from error
        return Choice(None, None) if choice.rule is None and self.default == "keep" else choice

    def _require_use(self, plan: _Plan) -> None:
        """Raise for a rule with a precision that no node with a weight got."""
        for index, rule in enumerate(self.rules):
            if rule.keep or any(c.rule == index and output in plan.forms for output, c in plan.choices.items()):
                continue
            met = {plan.described[output].op for output, choice in plan.choices.items() if choice.rule == index}
            earlier = (
                "an earlier rule takes all its nodes" if not met else f"it decides only for {', '.join(sorted(met))}"
            )
            raise VbpipeError(
                f"the rule {rule.describe()} quantizes nothing: {earlier}.",
                where=_place(index),
                hint="MatMul, Gemm, Conv and Gather with a constant weight can be quantized.",
            )

    def _form(self, precision: Precision, node: Described, rule: int | None) -> Form:
        if node.op == "Gather":
            return Form("table", 8, per_channel=precision.granularity == "per_channel")
        if precision.weight == "int4" or precision.activation == "float":
            return Form(
                "weight_only",
                4 if precision.weight == "int4" else 8,
                symmetric=precision.scheme != "asymmetric",
                group=precision.group_size,
                accuracy_level=precision.accuracy_level,
                contrib=self.contrib,
            )
        method = _calibration(precision, node.op, self.contrib)
        largest = SEVEN_BITS if self._reduces(precision) else 127
        per_channel = precision.granularity == "per_channel"
        if method == "dynamic":
            return Form("dynamic", 8, per_channel=per_channel, largest=largest)
        unsigned = self.on_processor and _processor.is_x86()
        activation: Literal["int8", "uint8"] = "uint8" if unsigned else "int8"
        if precision.activation in ("int8", "uint8"):
            activation = precision.activation
        self._refuse_slow(activation, precision, rule)
        symmetric = precision.scheme == "symmetric" if precision.scheme else activation == "int8"
        return Form(
            "static",
            8,
            activation,
            symmetric,
            per_channel,
            largest,
            contrib=self.contrib,
            method=Method(method, precision.percentile),
        )

    def _refuse_slow(self, activation: str, precision: Precision, rule: int | None) -> None:
        if activation == "int8" and self.on_processor and not _processor.has_signed_kernels() and not precision.force:
            raise VbpipeError(
                "int8 activations with int8 weights run on slow kernels on this processor, slower than float.",
                where=_place(rule),
                hint="Use `activation: uint8`, the form its kernels are made for, or `force: true`.",
            )

    def _reduces(self, precision: Precision) -> bool:
        if precision.reduce_range == "auto":
            return self.on_processor and _processor.int8_kernels() == "avx2"
        return precision.reduce_range

    def _depends_on_processor(self) -> bool:
        """Return whether another processor could give another graph: 8-bit weights whose range it decides."""
        precisions = [] if self.default == "keep" else [self.default]
        default = precisions[0] if precisions else Precision()
        precisions += [rule.over(default) for rule in self.rules if not rule.keep]
        return self.on_processor and any(p.weight == "int8" and p.activation != "float" for p in precisions)

    def _extents(
        self, model: onnx.ModelProto, plan: _Plan, ends: Mapping[str, Form], inputs: Inputs, site: Site
    ) -> dict[str, Extent]:
        wanted = observed(plan.forms, plan.found, ends)
        if not wanted:
            return {}
        path = inputs["samples"].path / CALIBRATION
        if not path.exists():
            raise VbpipeError(
                "static quantization needs calibration samples.",
                where=_WHERE,
                hint="Set data.calibration in the recipe, or use `calibration: dynamic`.",
            )
        readers = {plan.found[output].data: plan.described[output].path for output in plan.forms}
        return collect(model, wanted, samples.load(path), readers, site)

    def _effect(
        self, plan: _Plan, model: onnx.ModelProto, quantized: onnx.ModelProto, ranges: int, inputs: Inputs
    ) -> Meta:
        asked = []
        for index in [*range(len(self.rules)), None]:
            met = [output for output, choice in plan.choices.items() if choice.rule == index]
            asked.append(
                {
                    "rule": "default" if index is None else self.rules[index].describe(),
                    "nodes": len(met),
                    "quantized": sum(output in plan.forms for output in met),
                    "modules": sorted({plan.described[output].path for output in met if output in plan.forms}),
                }
            )
        candidates = [output for output in plan.choices if output in plan.found or output in plan.unfit]
        return {
            "effect": "changed",
            "warning": _made_up(inputs) if ranges else None,
            "asked": asked,
            "changed": dict(sorted(Counter(form.describe() for form in plan.forms.values()).items())),
            "quantized_nodes": len(plan.forms),
            "weighted_nodes": len(candidates),
            "kept": {plan.described[output].path or output: reason for output, reason in plan.kept.items()},
            "calibrated_tensors": ranges,
            "activations": sorted({form.activation for form in plan.forms.values() if form.kind == "static"}),
            "largest_weight": sorted({f.largest for f in plan.forms.values() if f.kind in ("static", "dynamic")}),
            "opset": [_onnx_graph.opset(model), _onnx_graph.opset(quantized)],
            "operators": _onnx_graph.operators(quantized),
        }


@dataclass(frozen=True)
class _Plan:
    """What is decided, by a node's first output; filled once, in the order of the graph."""

    found: Mapping[str, Weighted]
    unfit: Mapping[str, str]
    described: Mapping[str, Described]
    forms: dict[str, Form]
    choices: dict[str, Choice]
    kept: dict[str, str]

    def kept_outputs(self) -> frozenset[str]:
        """Return the outputs of nodes that a rule keeps, with or without a weight."""
        return frozenset(output for output, choice in self.choices.items() if choice.precision is None)

    def why_nothing(self) -> str:
        """Return what to do about a plan that quantizes nothing."""
        reasons = sorted(set(self.kept.values()))
        if reasons:
            return f"{reasons[0].capitalize()}: {', '.join(sorted(self.kept))[:200]}."
        if not self.found:
            return "The graph has no MatMul, Gemm or Conv with a constant weight; leave the stage out."
        return "The rules keep every layer; leave the stage out."


def _on_processor(target: Target) -> bool:
    if target.arch is not None or target.backend == "null":
        return False
    providers = target.options.get("providers", ())
    return not any(str(name).lower().startswith(("cuda", "tensorrt", "nvtensorrt", "rocm")) for name in providers)


def _described(node: onnx.NodeProto, provenance: Provenance) -> Described:
    output = node.output[0]
    path = provenance.nodes.get(output, "")
    if not path:
        owners = [
            provenance.parameters[name].rpartition(".")[0] for name in node.input if name in provenance.parameters
        ]
        path = owners[0] if owners else ""
    kind = provenance.classes.get(path, "") if path else ""
    return Described(output, path, (kind,) if kind else (), node.op_type)


def _calibration(precision: Precision, op: str, contrib: bool) -> Literal["minmax", "entropy", "percentile", "dynamic"]:
    if precision.calibration is not None:
        return precision.calibration
    fits = contrib and op != "Conv" and precision.activation != "int8" and precision.scheme != "symmetric"
    return "dynamic" if fits else "minmax"


def _place(rule: int | None) -> str:
    return f"{_WHERE}.default" if rule is None else f"{_WHERE}.rules[{rule}]"


def _most_damaged(found: Sequence[ModuleDamage]) -> dict[str, float]:
    """Return the few modules that bring in most error, and its share of their output's power."""
    return {one.module: round(one.own or 0.0, 6) for one in worst_first(found)}


def _made_up(inputs: Inputs) -> str | None:
    if inputs["samples"].meta.get("calibration") != "made up":
        return None
    return "activation ranges come from made-up samples; name real ones in data.calibration."


PLUGIN: type[Stage] = Quantize
