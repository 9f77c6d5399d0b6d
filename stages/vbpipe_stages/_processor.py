"""Facts about this host's processor that decide which kernels ONNX Runtime uses."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Literal

Int8Kernels = Literal["vnni", "avx2", "other"]
"""vnni: 8-bit products are summed in 32 bits. avx2: pairs are summed in 16 bits first, and saturate. other: no x86."""

_X86 = ("x86_64", "AMD64", "i686")


@cache
def flags() -> frozenset[str]:
    """Return the kernel's names of the processor's features; empty where /proc/cpuinfo has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def is_x86() -> bool:
    """Return whether this host's 8-bit kernels are x86's: unsigned activations times signed weights."""
    return platform.machine() in _X86


def int8_kernels() -> Int8Kernels:
    """Return which 8-bit multiply this host has."""
    if not is_x86():
        return "other"
    return "vnni" if flags() & {"avx512_vnni", "avx_vnni"} else "avx2"


def kind() -> str:
    """Return this host's name in `_kernels`: x86_avx2, x86_vnni, x86_vnni_int8, x86_amx, arm64 or other."""
    if is_x86():
        if "avx_vnni_int8" in flags():
            return "x86_vnni_int8"
        return "x86_amx" if "amx_int8" in flags() else f"x86_{int8_kernels()}"
    return "arm64" if platform.machine() in ("aarch64", "arm64") else "other"


def nchwc_block() -> str:
    """Return the channel block that ONNX Runtime writes into the graph at its highest level: "16", "8" or "none"."""
    if not is_x86():
        return "none"
    return "16" if "avx512f" in flags() else "8"
