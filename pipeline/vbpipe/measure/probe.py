"""A fixed workload that needs no artifact and no backend: for measuring the measuring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vbpipe.core import Run

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

BACKEND = "probe"
"""What a Candidate names as its backend to get this workload."""

SIZE = 256


def inputs() -> dict[str, Array]:
    """Return the workload's inputs: {"x": float32 [256, 256]}, equal on every machine."""
    import numpy as np

    return {"x": np.random.Generator(np.random.PCG64(0)).standard_normal((SIZE, SIZE), dtype=np.float32)}


@contextmanager
def opened() -> Iterator[Run]:
    """Give the workload as a Run: eight products of 256 x 256 and a tanh after each, about a millisecond."""
    import numpy as np

    def run(arrays: Mapping[str, Array]) -> dict[str, Array]:
        value = arrays["x"]
        for _ in range(8):
            value = np.tanh(value @ arrays["x"])
        return {"y": value}

    yield run
