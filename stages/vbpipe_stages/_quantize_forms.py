"""Choose how one operator is written for a dialect and a device, and refuse what these compute slowly or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from vbpipe.core import Dialect
from vbpipe.errors import UsageError
from vbpipe_stages import _processor
from vbpipe_stages._calibration import Method
from vbpipe_stages._kernels import Kernel, find_kernel
from vbpipe_stages._quantize_rules import HighPrecision, Precision, misfit
from vbpipe_stages._quantize_weights import SEVEN_BITS

Kind = Literal["static", "dynamic", "weight_only", "table", "half"]
DType = Literal["int8", "int4", "fp8", "fp16", "bf16"]
PROCESSOR = "processor"
"""Stands for this host's own, whatever it is."""

_MINMAX = Method("minmax")
_HALF: Mapping[str, HighPrecision] = {"fp16": "fp16", "bf16": "bf16"}


@dataclass(frozen=True)
class Form:
    """How one node is written, with nothing left to choose.

    static: Q/DQ around inputs, and around the output of a Conv where `ends`. dynamic: DynamicQuantizeLinear and
    MatMulInteger. weight_only: MatMulNBits, or DequantizeLinear of the weights where `contrib` is off. table: a Gather
    of 8-bit rows. half: the operator itself, in `dtype`.
    """

    kind: Kind
    dtype: DType
    """Of weights."""
    activation: Literal["int8", "uint8", "fp8"] = "uint8"
    symmetric: bool = False
    per_channel: bool = True
    largest: int = 127
    """Magnitude of 8-bit weights."""
    group: int | None = 32
    """None: one scale for each output."""
    accuracy_level: int = 4
    contrib: bool = True
    ends: bool = True
    """Whether a Conv's output is rounded where it is made; TensorRT wants Q/DQ on inputs only."""
    method: Method = _MINMAX
    high: HighPrecision = "fp32"
    """What the operator gives, and everything around it computes in."""

    @property
    def bits(self) -> int:
        """How many a weight takes."""
        return {"int4": 4, "int8": 8, "fp8": 8, "fp16": 16, "bf16": 16}[self.dtype]

    def describe(self) -> str:
        """Return the name under which the effect counts it: "static int8", "fp16", "static int8 in fp16"."""
        name = self.dtype if self.kind == "half" else f"{self.kind} {self.dtype}"
        return name if self.kind == "half" or self.high == "fp32" else f"{name} in {self.high}"


@dataclass(frozen=True)
class Lowering:
    """For whom graphs are written.

    `device` is an architecture such as "sm86", "processor" for this host's own, "cuda" for a GPU that is not known, or
    None for an interpreter, which is slow with everything.
    """

    dialect: Dialect
    device: str | None

    def high(self, precision: Precision | None) -> HighPrecision:
        """Return what goes on around an operator of that precision; None stands for one that is kept."""
        if precision is None:
            return "fp32"
        own = _HALF.get(precision.weight) or _HALF.get(precision.activation or "") or precision.high_precision
        if own is not None:
            return own
        return "fp16" if self.dialect == "tensorrt" and precision.weight != "float" else "fp32"

    def form(self, precision: Precision, op: str, where: str) -> Form:
        """Return the form of a MatMul, Gemm, Conv or Gather.

        Raises:
            UsageError: the device computes it slowly and it is not forced, or not at all; names what to ask for.
        """
        high = self.high(precision)
        contrib = self.dialect == "onnxruntime"
        if precision.half is not None:
            found = Form("half", precision.half, high=high, contrib=contrib)
        elif op == "Gather":
            found = Form("table", "int8", per_channel=precision.granularity == "per_channel", high=high)
        elif precision.weight_only:
            found = self._weight_only(precision, high)
        else:
            found = self._with_activations(precision, op, high)
        if found.kind != "table":
            self._refuse(self._known(found, op), found, precision, where)
        return found

    def refuse(self, precision: Precision, ops: tuple[str, ...], where: str) -> None:
        """Raise UsageError for a precision that none of the operators `ops` can have."""
        problems: list[UsageError] = []
        ops = tuple(op for op in ops if not misfit(precision, op, 0))
        for op in ops:
            try:
                self.form(precision, op, where)
            except UsageError as error:
                problems.append(error)
        if problems and len(problems) == len(ops):
            raise problems[0]

    def _weight_only(self, precision: Precision, high: HighPrecision) -> Form:
        dtype: DType = "int4" if precision.weight == "int4" else "fp8" if precision.weight == "fp8" else "int8"
        # TensorRT takes groups for 4-bit weights only.
        grouped = dtype == "int4" or (dtype == "int8" and self.dialect != "tensorrt")
        return Form(
            "weight_only",
            dtype,
            symmetric=precision.scheme != "asymmetric",
            group=precision.group_size if grouped else None,
            accuracy_level=precision.accuracy_level,
            contrib=self.dialect == "onnxruntime" and dtype != "fp8",
            high=high,
        )

    def _with_activations(self, precision: Precision, op: str, high: HighPrecision) -> Form:
        contrib, ends = self.dialect == "onnxruntime", self.dialect != "tensorrt"
        if precision.weight == "fp8":
            method = Method("percentile" if precision.calibration == "percentile" else "minmax", precision.percentile)
            # Its products fuse with one scale for each tensor only.
            return Form(
                "static", "fp8", "fp8", symmetric=True, per_channel=False, contrib=False, ends=False, method=method,
                high=high,
            )  # fmt: skip
        largest = SEVEN_BITS if self._reduces(precision) else 127
        per_channel = precision.granularity == "per_channel"
        name = _calibration(precision, op, contrib)
        if name == "dynamic":
            return Form("dynamic", "int8", per_channel=per_channel, largest=largest, high=high, contrib=contrib)
        unsigned = self.device == PROCESSOR and _processor.is_x86()
        activation: Literal["int8", "uint8"] = "uint8" if unsigned else "int8"
        if precision.activation == "int8" or precision.activation == "uint8":  # narrows the type
            activation = precision.activation
        return Form(
            "static",
            "int8",
            activation,
            precision.scheme == "symmetric" if precision.scheme else activation == "int8",
            per_channel,
            largest,
            contrib=contrib,
            ends=ends,
            method=Method(name, precision.percentile),
            high=high,
        )

    def _reduces(self, precision: Precision) -> bool:
        if precision.reduce_range == "auto":
            return self.device == PROCESSOR and _processor.int8_kernels() == "avx2"
        return precision.reduce_range

    def _known(self, form: Form, op: str) -> Kernel | None:
        device = _processor.kind() if self.device == PROCESSOR else self.device
        return find_kernel(self.dialect, device, op, kernel_form(form))

    def _refuse(self, known: Kernel | None, form: Form, precision: Precision, where: str) -> None:
        if known is None or known.speed == "fast" or (precision.force and known.speed != "absent"):
            return
        device = "this processor" if self.device == PROCESSOR else self.device
        says = {"slow": "is slow on", "no gain": "gains nothing on", "absent": "can't run on"}[known.speed]
        force = "" if known.speed == "absent" else ", or `force: true`"
        raise UsageError(
            f"{form.describe()} {says} {device}: {known.why}.",
            where=where,
            hint=f"Use `{known.instead}`{force}. Source: {known.source}.",
        )


def kernel_form(form: Form) -> str:
    """Return a form as the table of kernels names it: "static u8s8 asymmetric", "weight_only int4", "fp16"."""
    if form.kind == "half":
        return form.dtype
    if form.kind == "dynamic":
        return "dynamic u8s8"
    values = {"int8": "s8s8", "uint8": "u8s8", "fp8": "fp8"}[form.activation]
    name = f"static {values}" if form.kind == "static" else f"weight_only {form.dtype}"
    return name if form.symmetric else f"{name} asymmetric"


def _calibration(precision: Precision, op: str, contrib: bool) -> Literal["minmax", "entropy", "percentile", "dynamic"]:
    if precision.calibration is not None:
        return precision.calibration
    fits = contrib and op != "Conv" and precision.activation != "int8" and precision.scheme != "symmetric"
    return "dynamic" if fits else "minmax"
