"""Ask the NVIDIA driver, through its own library, which GPUs this host has."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
(https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html)."""


def architectures() -> tuple[str, ...]:
    """Return the compute capability of each GPU that can be used, in the driver's order: ("sm86",). Never raises."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(_of_each(driver, count.value))


def _of_each(driver: ctypes.CDLL, count: int) -> Iterator[str]:
    for index in range(count):
        device, values = ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
        if driver.cuDeviceGet(ctypes.byref(device), index):
            continue
        asked = zip(values, (_MAJOR, _MINOR), strict=True)
        if not any(driver.cuDeviceGetAttribute(ctypes.byref(value), which, device) for value, which in asked):
            yield f"sm{values[0].value}{values[1].value}"
