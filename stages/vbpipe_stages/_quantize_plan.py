"""Decide for every node of a graph which rule it meets, and how it is to be written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from vbpipe.errors import UsageError, VbpipeError
from vbpipe_stages import _half
from vbpipe_stages._provenance import Provenance
from vbpipe_stages._quantize_forms import Form, Lowering
from vbpipe_stages._quantize_rules import (
    Choice,
    Described,
    HighPrecision,
    Precision,
    Rule,
    misfit,
    require_matches,
)
from vbpipe_stages._weighted_nodes import Weighted, weighted

if TYPE_CHECKING:
    import onnx

WHERE = "stages.quantize"


@dataclass(frozen=True)
class Asked:
    """What a recipe asks for, and for whom."""

    rules: tuple[Rule, ...]
    default: Precision | Literal["keep"]
    lowering: Lowering

    def choice(self, node: Described) -> Choice:
        """Return the first rule that the node meets and what it gives, else the default."""
        for index, rule in enumerate(self.rules):
            if rule.meets(node):
                return Choice(None if rule.keep else self.over(index), index)
        return Choice(None if self.default == "keep" else self.default, None)

    def over(self, index: int) -> Precision:
        """Return what a rule asks for; raises UsageError where it clashes with the default."""
        try:
            return self.rules[index].over(Precision() if self.default == "keep" else self.default)
        except ValidationError as error:
            found = "; ".join(str(entry["msg"]) for entry in error.errors())
            raise UsageError(
                f"the rule and the default make no sense together: {found}.", where=place(index)
            ) from error

    def form(self, precision: Precision, op: str, rule: int | None) -> Form:
        """Return the form of an operator; raises UsageError for one that the target should not or can't have."""
        return self.lowering.form(precision, op, place(rule))


@dataclass(frozen=True)
class Plan:
    """What is decided, by a node's first output; filled once, in the order of the graph.

    `forms` has those that get another form, `high` what the others compute in, `kept` why one that only the default
    meets is left as it is.
    """

    asked: Asked
    found: Mapping[str, Weighted]
    unfit: Mapping[str, str]
    described: Mapping[str, Described]
    forms: dict[str, Form]
    choices: dict[str, Choice]
    high: dict[str, HighPrecision]
    kept: dict[str, str]

    def kept_outputs(self) -> frozenset[str]:
        """Return the outputs of nodes that a rule keeps, with or without a weight."""
        return frozenset(output for output, choice in self.choices.items() if choice.precision is None)

    def halves(self, model: onnx.ModelProto, new: Mapping[str, HighPrecision]) -> dict[str, _half.Half]:
        """Return the nodes of the rewritten graph that are to compute in fp16 or bf16.

        Args:
            model: the rewritten graph.
            new: first output of a node that the rewrite made, to its type.
        """
        types = {**self.high, **new}
        outputs = (node.output[0] for node in model.graph.node if node.output)
        found = {output: types.get(output, "fp32") for output in outputs}
        return {output: kind for output, kind in found.items() if kind != "fp32"}

    def precisions(self) -> dict[str, str]:
        """Return module to what its operators with weights become, "float" for those that keep theirs."""
        found: dict[str, list[str]] = {}
        for output in self.choices:
            if output in self.found or output in self.unfit:
                found.setdefault(self.described[output].path, []).append(self._form_of(output))
        return {module: "; ".join(dict.fromkeys(forms)) for module, forms in found.items() if module}

    def shared_weights(self) -> str | None:
        """Return which modules share a weight and don't get the same: it is then stored more than once."""
        readers: dict[str, dict[str, str]] = {}
        for output, item in self.found.items():
            if output in self.choices:
                readers.setdefault(item.source, {})[self.described[output].path or output] = self._form_of(output)
        apart = [forms for forms in readers.values() if len(set(forms.values())) > 1]
        said = ("; ".join(f"{module} gets {told}" for module, told in forms.items()) for forms in apart)
        return "; ".join(f"one weight, stored for each form: {text}" for text in said) or None

    def _form_of(self, output: str) -> str:
        form = self.forms.get(output)
        return "float" if form is None else form.describe()

    def told(self) -> list[dict[str, object]]:
        """Return for every rule, the default last, how many nodes it met, and which modules changed for it."""
        counted = []
        for index in [*range(len(self.asked.rules)), None]:
            met = [output for output, choice in self.choices.items() if choice.rule == index]
            changed = [output for output in met if output in self.forms]
            counted.append(
                {
                    "rule": "default" if index is None else self.asked.rules[index].describe(),
                    "nodes": len(met),
                    "quantized": len(changed),
                    "modules": sorted({self.described[output].path for output in changed}),
                }
            )
        return counted

    def counts(self) -> dict[str, int]:
        """Return form to the number of nodes that get it."""
        return dict(sorted(Counter(form.describe() for form in self.forms.values()).items()))

    def why_nothing(self) -> str:
        """Return what to do about a plan that changes nothing."""
        reasons = sorted(set(self.kept.values()))
        if reasons:
            return f"{reasons[0].capitalize()}: {', '.join(sorted(self.kept))[:200]}."
        if not self.found:
            return "The graph has no MatMul, Gemm or Conv with a constant weight; leave the stage out."
        return "The rules keep every layer; leave the stage out."


def make_plan(model: onnx.ModelProto, provenance: Provenance, asked: Asked) -> Plan:
    """Return what becomes of every node.

    Raises:
        VbpipeError: a rule meets nothing, changes nothing, or asks for what a node can't have.
    """
    found, unfit = weighted(model)
    nodes = [node for node in model.graph.node if node.output and node.output[0]]
    described = {node.output[0]: _described(node, provenance) for node in nodes}
    require_matches(asked.rules, described.values(), provenance.classes)
    plan = Plan(asked, found, unfit, described, forms={}, choices={}, high={}, kept={})
    for output in described:
        _decide(output, plan)
    _require_use(plan, {node.output[0] for node in nodes if not _half.stays(node)})
    return plan


def place(rule: int | None) -> str:
    """Return where in a recipe a decision was made."""
    return f"{WHERE}.default" if rule is None else f"{WHERE}.rules[{rule}]"


def _decide(output: str, plan: Plan) -> None:
    node = plan.described[output]
    choice = plan.asked.choice(node)
    plan.high[output] = plan.asked.lowering.high(choice.precision)
    asked_gather = choice.rule is not None and plan.asked.rules[choice.rule].names_table(node)
    if output not in plan.found and output not in plan.unfit:
        if choice.rule is not None:
            plan.choices[output] = choice
        return
    # In fp16 a table is an operator like others; int8 rows are a form of their own, which a rule must name.
    in_half = choice.precision is not None and choice.precision.half is not None and output in plan.found
    if node.op == "Gather" and not (asked_gather or in_half):
        return
    plan.choices[output] = choice
    precision = choice.precision
    if precision is None:
        return
    problem = plan.unfit.get(output) or misfit(precision, node.op, plan.found[output].weight.shape[0])
    if not problem:
        plan.forms[output] = plan.asked.form(precision, node.op, choice.rule)
    elif choice.rule is None and (node.op == "Conv" or output in plan.unfit):
        plan.kept[output] = problem
    else:
        raise VbpipeError(
            f"{node.path or output} ({node.op}) can't be quantized as asked: {problem}.",
            where=place(choice.rule),
            hint=f"Change it, or keep the module: rules: [{{match: {node.path or '…'!r}, keep: true}}].",
        )


def _require_use(plan: Plan, convertible: set[str]) -> None:
    """Raise for a rule with a precision that changes no node."""
    for index, rule in enumerate(plan.asked.rules):
        met = [output for output, choice in plan.choices.items() if choice.rule == index]
        if rule.keep or any(output in plan.forms for output in met):
            continue
        if any(output in convertible and plan.high[output] != "fp32" for output in met):
            continue
        ops = sorted({plan.described[output].op for output in met})
        earlier = "an earlier rule takes all its nodes" if not ops else f"it decides only for {', '.join(ops)}"
        hint = "MatMul, Gemm, Conv and Gather with a constant weight can be quantized."
        if ops and any(plan.high[output] != "fp32" for output in met):
            hint = "Norms, softmax and sums stay in float32: fp16 can't hold their squares."
        raise VbpipeError(f"the rule {rule.describe()} quantizes nothing: {earlier}.", where=place(index), hint=hint)


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


def fighting_rules(rules: Sequence[Rule]) -> str | None:
    """Return which rule can never decide because an earlier one meets all that it meets; None where all can."""
    for later, rule in enumerate(rules):
        for earlier, other in enumerate(rules[:later]):
            asked = (other.match, other.regex, other.type, other.op)
            same = (rule.match, rule.regex, rule.type, rule.op)
            if all(mine is None or mine == theirs for mine, theirs in zip(asked, same, strict=True)):
                return (
                    f"rules[{later}] ({rule.describe()}) can never decide: rules[{earlier}] ({other.describe()}) meets "
                    f"all that it meets, and the first that meets a node decides"
                )
    return None
