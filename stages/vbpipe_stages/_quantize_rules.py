"""Which precision a recipe asks for, node by node."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from vbpipe.core import Spec
from vbpipe.errors import VbpipeError

Weight = Literal["int8", "int4", "fp8", "fp16", "bf16", "float"]
Activation = Literal["int8", "uint8", "fp8", "fp16", "bf16", "float"]
HighPrecision = Literal["fp32", "fp16", "bf16"]
Calibration = Literal["minmax", "entropy", "percentile", "dynamic"]
Scheme = Literal["symmetric", "asymmetric"]


class Precision(Spec):
    """How one operator computes. What is not set is chosen for the operator, the processor and the target.

    Weights are symmetric where activations are quantized: x86's 8-bit kernels are fastest so. `scheme` is that of the
    activations, or of the weights where only they are quantized.
    """

    weight: Weight = "int8"
    """fp16, bf16: the operator computes in that type, and so do those without weights that the rule meets; norms,
    softmax and sums stay in float32. fp8 is E4M3."""
    activation: Activation | None = None
    """For int8 weights uint8 on x86 and int8 elsewhere, fp8 for fp8 weights, else those of the weights; float for int4
    weights. float: only weights are quantized, and so it is with fp16 and bf16, which set `high_precision` as well."""
    high_precision: HighPrecision | None = None
    """What quantized operators give and what goes on around them. fp16 for TensorRT, whose int8 is slower than its fp16
    where all the rest is fp32; fp32 elsewhere; fp16 and bf16 weights bring their own."""
    calibration: Calibration | None = None
    """dynamic where the target runs it, for it needs no samples and is closest to eager on transformers; a Conv gets
    minmax, for dynamic 8-bit convolutions are slower than float ones."""
    scheme: Scheme | None = None
    granularity: Literal["per_tensor", "per_channel"] = "per_channel"
    """Of 8-bit weights; activations are always per tensor."""
    group_size: Literal[16, 32, 64, 128, 256] = 32
    """How many weights along the reduced axis share a scale, where only weights are quantized."""
    reduce_range: Literal["auto"] | bool = "auto"
    """Keep 8-bit weights to seven bits; auto: on x86 without VNNI, where sums of two products saturate."""
    accuracy_level: Annotated[int, Field(ge=0, le=4)] = 4
    """Of ONNX Runtime's weight-only kernels: 4 computes in int8 and is fastest, 1 in float32."""
    percentile: Annotated[float, Field(gt=50, le=100)] = 99.99
    force: bool = False
    """Accept a combination known to be slow on this processor."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Precision:
        if self.weight == "float" and self.activation not in (None, "float"):
            raise ValueError(
                "float weights with quantized activations save nothing: quantize the weights, or keep both"
            )
        if self.weight == "int4" and self.activation not in (None, "float", "fp16", "bf16"):
            raise ValueError("int4 weights need float activations: leave `activation` out")
        if self.activation == "fp8" and self.weight != "fp8":
            raise ValueError("fp8 activations need fp8 weights")
        if self.weight == "fp8" and self.activation in ("int8", "uint8"):
            raise ValueError("fp8 weights need fp8 or float activations")
        if self.weight == "fp8" and (self.scheme == "asymmetric" or self.calibration == "dynamic"):
            raise ValueError("fp8 is symmetric and static: leave `scheme` out, and use minmax or percentile")
        if self.weight in ("fp16", "bf16") and self.activation not in (None, self.weight):
            raise ValueError(f"{self.weight} weights compute with {self.weight} activations: leave `activation` out")
        own = next((name for name in (self.weight, self.activation) if name in ("fp16", "bf16")), None)
        if own is not None and self.high_precision not in (None, own):
            raise ValueError(f"{own} and `high_precision: {self.high_precision}` exclude each other")
        if self.calibration == "dynamic" and self.activation == "int8":
            raise ValueError(
                "dynamic activations are uint8 (DynamicQuantizeLinear): use `activation: uint8`, or minmax"
            )
        if self.calibration == "dynamic" and self.scheme == "symmetric" and self.weight == "int8":
            raise ValueError("dynamic activations are asymmetric: leave `scheme` out, or use minmax")
        return self

    @property
    def half(self) -> Literal["fp16", "bf16"] | None:
        """The type in which the operator computes where nothing is quantized; None for the others."""
        return self.weight if self.weight in ("fp16", "bf16") else None

    @property
    def weight_only(self) -> bool:
        """Whether weights are quantized and activations are not."""
        return self.half is None and (self.weight == "int4" or self.activation in ("float", "fp16", "bf16"))


_FIELDS = tuple(Precision.model_fields)


class Rule(Spec):
    """The nodes that meet all of `match`, `regex`, `type` and `op`, and what they get: `keep: true`, or a precision.

    Fields that are not given are those of `default`, unless the rule sets another `weight`.
    """

    match: str | None = None
    """A glob on the PyTorch module's path; a module's children are part of it."""
    regex: str | None = None
    """A regular expression (Python's) that the whole path matches, or that of a module around it."""
    type: str | None = None
    """The module's class."""
    op: str | None = None
    """The ONNX operator."""
    keep: Literal[True] | None = None
    weight: Weight | None = None
    activation: Activation | None = None
    high_precision: HighPrecision | None = None
    calibration: Calibration | None = None
    scheme: Scheme | None = None
    granularity: Literal["per_tensor", "per_channel"] | None = None
    group_size: Literal[16, 32, 64, 128, 256] | None = None
    reduce_range: Literal["auto"] | bool | None = None
    accuracy_level: Annotated[int, Field(ge=0, le=4)] | None = None
    percentile: Annotated[float, Field(gt=50, le=100)] | None = None
    force: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> Rule:
        if all(part is None for part in (self.match, self.regex, self.type, self.op)):
            raise ValueError("a rule needs one of match, regex, type, op")
        given = self.precision_fields()
        if self.keep and given:
            raise ValueError(f"`keep: true` and {', '.join(given)} exclude each other")
        if not self.keep and not given:
            raise ValueError("a rule needs `keep: true` or a precision, such as `weight: int4`")
        return self

    @field_validator("match", "regex", "type", "op")
    @classmethod
    def _not_empty(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value == "":
            raise ValueError(f"{info.field_name} is empty and would meet nothing")
        return value

    @field_validator("regex")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"{value!r} is no regular expression: {error}") from error
        return value

    def precision_fields(self) -> dict[str, Any]:
        """Return the fields of a precision that the rule sets."""
        return {name: getattr(self, name) for name in _FIELDS if getattr(self, name) is not None}

    def over(self, default: Precision) -> Precision:
        """Return the precision that the rule asks for; raises ValueError for one that makes no sense."""
        given = self.precision_fields()
        inherits = given.get("weight", default.weight) == default.weight
        base = {name: getattr(default, name) for name in default.model_fields_set} if inherits else {}
        return Precision.model_validate({**base, **given})

    def describe(self) -> str:
        """Return what the rule looks for: "match=*.attention.* op=MatMul"."""
        asked = (("match", self.match), ("regex", self.regex), ("type", self.type), ("op", self.op))
        return " ".join(f"{name}={value}" for name, value in asked if value is not None)

    def meets(self, node: Described) -> bool:
        """Return whether the node is one of the rule's."""
        return (
            (self.match is None or _within(node.path, lambda path: fnmatch.fnmatchcase(path, self.match or "")))
            and (
                self.regex is None or _within(node.path, lambda path: re.fullmatch(self.regex or "", path) is not None)
            )
            and (self.type is None or self.type in node.classes)
            and (self.op is None or node.op == self.op)
        )

    def names_table(self, node: Described) -> bool:
        """Return whether the rule quantizes the node as a table, which it has to name by its operator or class."""
        return not self.keep and node.op == "Gather" and (self.op == "Gather" or self.type in node.classes)


@dataclass(frozen=True)
class Described:
    """What rules know of a node: its place, the class of its module, its operator."""

    output: str
    path: str
    classes: tuple[str, ...]
    op: str


@dataclass(frozen=True)
class Choice:
    """What a node gets. `precision` is None where it is kept; `rule` is the place in `rules`, None for the default."""

    precision: Precision | None
    rule: int | None


def require_matches(rules: Sequence[Rule], nodes: Iterable[Described], classes: Mapping[str, str]) -> None:
    """Raise VbpipeError for a rule that meets nothing in the graph, with what is near.

    A module whose nodes a fusion took over still counts: it exists in the model.
    """
    modules = [Described("", path, (name,), "") for path, name in classes.items()]
    everything = [*nodes, *modules]
    for index, rule in enumerate(rules):
        if not any(rule.meets(node) for node in everything):
            raise VbpipeError(
                f"no node of the graph is met by {rule.describe()}.",
                where=f"stages.quantize.rules[{index}]",
                hint=_near(rule, everything),
            )


def misfit(precision: Precision, op: str, inputs: int) -> str:
    """Return what keeps an operator from that precision; empty where nothing does.

    Args:
        precision: what is asked for.
        op: MatMul, Gemm, Conv or Gather.
        inputs: how many values a MatMul or Gemm sums up.
    """
    if precision.weight == "float":
        return "`weight: float` changes nothing; say `keep: true`"
    if precision.half is not None:
        return ""
    if op == "Gather":
        return "" if precision.weight == "int8" else "a table is quantized to int8 only"
    if op == "Conv" and precision.weight_only:
        return "a Conv has no form with only its weights quantized"
    if op == "Conv" and precision.calibration == "dynamic":
        return "dynamic 8-bit convolutions are slower than float ones; use `calibration: minmax`"
    if precision.weight_only and precision.weight != "fp8" and inputs % precision.group_size:
        return f"group_size {precision.group_size} does not divide its {inputs} inputs"
    return ""


def _within(path: str, meets: Callable[[str], bool]) -> bool:
    """Return whether the module or one around it meets a pattern."""
    parts = path.split(".")
    return any(meets(".".join(parts[: end + 1])) for end in range(len(parts)))


def _near(rule: Rule, nodes: Sequence[Described]) -> str:
    for wanted, there in (
        (rule.match, sorted({node.path for node in nodes if node.path})),
        (rule.regex, sorted({node.path for node in nodes if node.path})),
        (rule.type, sorted({name for node in nodes for name in node.classes if name})),
        (rule.op, sorted({node.op for node in nodes if node.op})),
    ):
        if wanted is None or wanted in there:
            continue
        near = difflib.get_close_matches(wanted, there, n=3, cutoff=0.5) or there[:3]
        if near:
            return f"Did you mean {', '.join(repr(name) for name in near)}?"
    return "Each part is met by some node, but no node meets all of them."
