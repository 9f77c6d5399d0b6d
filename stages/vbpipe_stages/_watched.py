"""Open a graph such that tensors from its inside come out of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vbpipe_stages import _onnx_graph

if TYPE_CHECKING:
    import onnx


def watched(model: onnx.ModelProto, tensors: Sequence[str], folder: Path, *, rewrite: bool = True) -> Any:
    """Return a session of one thread whose outputs are those of the graph, then `tensors`.

    Args:
        model: the graph; left as it is.
        tensors: of its main graph. Its own outputs come once, its inputs not at all.
        folder: an empty one, for as long as the session lives.
        rewrite: let ONNX Runtime replace operators by its own kernels. Without, every operator of the graph is computed
            as ONNX defines it, so that 8-bit products never saturate where this processor's fused kernels would.
    """
    import onnx
    import onnxruntime as ort

    seen = onnx.ModelProto()
    seen.CopyFrom(model)
    there = {value.name for value in (*seen.graph.output, *seen.graph.input)}
    seen.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors if name not in there)
    _onnx_graph.write(seen, folder)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    # Arenas keep the largest row's activations for good.
    options.enable_cpu_mem_arena = False
    if not rewrite:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(str(folder / _onnx_graph.MODEL), options, providers=["CPUExecutionProvider"])
