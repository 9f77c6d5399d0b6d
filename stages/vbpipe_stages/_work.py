"""Count the arithmetic that one eager inference does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vbpipe.core import Run

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def count_flops(run: Run, sample: Mapping[str, Array]) -> tuple[float, dict[str, Array]]:
    """Run the sample once in eager and return (floating-point operations, outputs).

    Matrix products, convolutions and attention are counted, a multiply-add as two, as torch's own counter does;
    elementwise work is not.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    def attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object) -> int:
        return int(sdpa_flop_count(query, key, value))

    # torch's table has the attention kernels of GPUs only.
    cpu_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={cpu_kernel: attention}) as counter:
        outputs = run(sample)
    return float(counter.get_total_flops()), outputs
