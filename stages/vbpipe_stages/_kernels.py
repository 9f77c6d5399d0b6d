"""Which forms of an operator each processor and GPU computes fast, slowly or not at all: one table with sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vbpipe.core import Dialect

Speed = Literal["fast", "no gain", "slow", "absent"]
"""Against float32 on the same device. no gain: it runs at float32's speed, though smaller. absent: it can't run."""

X86 = ("x86_avx2", "x86_vnni", "x86_vnni_int8", "x86_amx")
GPUS = ("sm75", "sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm120", "sm121")


@dataclass(frozen=True)
class Kernel:
    """How one form of some operators does on some devices.

    Args:
        dialect: whose graphs it is about, see `Backend.dialect`.
        devices: processors as `_processor.kind` names them, GPUs by their compute capability; empty: all.
        operators: MatMul stands for Gemm as well; empty: all.
        form: see `form_name`.
        speed: how it does.
        why: what is known, for the reader of a message.
        instead: what to ask for where it is slow or absent: fields of a rule.
        source: where that is from.
    """

    dialect: Dialect
    devices: tuple[str, ...]
    operators: tuple[str, ...]
    form: str
    speed: Speed
    why: str
    source: str
    instead: str = ""


_MEASURED = "measured with ONNX Runtime 1.32 on an AVX2 processor without VNNI (AMD Zen 3)"
_MEASURED_VNNI = "measured with ONNX Runtime 1.32 on a Xeon with VNNI, single operators, 1 thread"
_TRIED = "tried with TensorRT for RTX 1.7.1"
_SUPPORT = "https://docs.nvidia.com/deeplearning/tensorrt/latest/getting-started/support-matrix.html"
_QUANTIZED = "https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/work-with-quantized-types.html"
_ORT_QUANTIZATION = "https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html"

KERNELS: tuple[Kernel, ...] = (
    Kernel("onnxruntime", X86, (), "static u8s8", "fast", "the form that x86's 8-bit kernels are made for", _MEASURED),
    Kernel("onnxruntime", ("x86_avx2",), ("MatMul", "Conv"), "static s8s8", "slow",
           "0.46x of eager on a small encoder where u8s8 is 3.8x", _MEASURED, "activation: uint8"),
    Kernel("onnxruntime", ("x86_vnni",), ("MatMul", "Conv"), "static s8s8", "fast",
           "2.5 to 3.2x of fp32 in matrix products and a 3x3 convolution, as u8s8", _MEASURED_VNNI),
    Kernel("onnxruntime", X86, ("MatMul",), "dynamic u8s8", "fast",
           "1.5 to 4.4x of eager on a small encoder", _MEASURED),
    Kernel("onnxruntime", (), ("Conv",), "dynamic u8s8", "slow",
           "0.83x of eager on a small convolutional network", _MEASURED, "calibration: minmax"),
    Kernel("onnxruntime", X86, ("MatMul",), "weight_only int4", "fast",
           "4.7x of eager for one token, 0.9 to 1.2x on an encoder at 128 tokens", _MEASURED),
    Kernel("onnxruntime", X86, ("MatMul",), "weight_only int8", "fast",
           "3.4x of eager for one token, 0.86x for a prompt", _MEASURED),
    Kernel("onnxruntime", X86, (), "fp16", "no gain",
           "it has no such kernels here and casts to float32 and back around each operator", _MEASURED, "keep: true"),
    Kernel("onnxruntime", X86, (), "bf16", "absent",
           "it has no such MatMul on a processor (NOT_IMPLEMENTED)", "tried with ONNX Runtime 1.32", "keep: true"),
    Kernel("onnxruntime", X86, (), "static fp8", "slow",
           "0.35x of float32 in a matrix product", _MEASURED_VNNI, "weight: int8"),
    Kernel("onnxruntime", X86, (), "weight_only fp8", "slow",
           "0.48x of float32 in a matrix product", _MEASURED_VNNI, "weight: int8, activation: float"),
    Kernel("onnxruntime", ("x86_vnni_int8",), (), "static s8s8", "fast", "vpdpbssd takes signed times signed",
           "https://www.intel.com/content/www/us/en/docs/intrinsics-guide/index.html"),
    Kernel("onnxruntime", ("arm64",), (), "static s8s8", "fast", "its dot product takes signed values",
           _ORT_QUANTIZATION),
    Kernel("onnxruntime", ("cuda",), (), "fp16", "fast", "tensor cores", _ORT_QUANTIZATION),
    Kernel("tensorrt", (), (), "static s8s8 asymmetric", "absent",
           "its parser takes signed values with a zero point of 0 only", _TRIED, "scheme: symmetric"),
    Kernel("tensorrt", (), (), "static s8s8", "fast", "tensor cores, where the Q/DQ nodes fuse", _QUANTIZED),
    Kernel("tensorrt", (), (), "static u8s8", "absent",
           "its parser takes signed values with a zero point of 0 only", _TRIED, "activation: int8, scheme: symmetric"),
    Kernel("tensorrt", (), (), "dynamic u8s8", "absent",
           "its parser has no DynamicQuantizeLinear", _TRIED, "calibration: minmax"),
    Kernel("tensorrt", (), (), "weight_only int4 asymmetric", "absent",
           "its parser takes signed weights with a zero point of 0 only", _TRIED, "scheme: symmetric"),
    Kernel("tensorrt", (), (), "weight_only int8 asymmetric", "absent",
           "its parser takes signed weights with a zero point of 0 only", _TRIED, "scheme: symmetric"),
    Kernel("tensorrt", ("sm75",), ("MatMul",), "weight_only int4", "absent",
           "the compiler refuses int4 for this architecture", _TRIED, "weight: int8"),
    Kernel("tensorrt", GPUS[1:], ("MatMul",), "weight_only int4", "fast",
           "for small batches, which wait for weights; groups of 64 or 128", _QUANTIZED),
    Kernel("tensorrt", (), ("MatMul",), "weight_only int8", "fast", "for small batches", _QUANTIZED),
    Kernel("tensorrt", (), (), "fp16", "fast", "tensor cores", _SUPPORT),
    Kernel("tensorrt", ("sm75",), (), "bf16", "absent", "Turing has no bf16", _SUPPORT, "weight: fp16"),
    Kernel("tensorrt", GPUS[1:], (), "bf16", "fast", "tensor cores", _SUPPORT),
    Kernel("tensorrt", ("sm75", "sm80", "sm86", "sm87"), (), "static fp8", "absent",
           "the compiler refuses fp8 before compute capability 8.9", _TRIED, "weight: int8"),
    Kernel("tensorrt", ("sm75", "sm80", "sm86", "sm87"), (), "weight_only fp8", "absent",
           "the compiler refuses fp8 before compute capability 8.9", _TRIED, "weight: int8, activation: float"),
    Kernel("tensorrt", ("sm89", "sm90", "sm100", "sm120", "sm121"), (), "static fp8", "fast", "tensor cores", _SUPPORT),
)  # fmt: skip
"""The first row that meets a form says how it does. Of one that none meets nothing is known, and it is let through."""


def find_kernel(dialect: Dialect, device: str | None, operator: str, form: str) -> Kernel | None:
    """Return what is known of a form on a device, None where nothing is; an unknown device meets rows for all only."""
    kind = "MatMul" if operator == "Gemm" else operator
    for row in KERNELS:
        if (
            row.dialect == dialect
            and form in (row.form, f"{row.form} asymmetric")
            and (not row.devices or device in row.devices)
            and (not row.operators or kind in row.operators)
        ):
            return row
    return None
