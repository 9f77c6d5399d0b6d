"""Compile an ONNX file with TensorRT for RTX, in a process of its own: rtx_compile.py MODEL ARCH PROFILE.

PROFILE is JSON, input to its three shapes. Prints the plan's size and how many layers compute in each type; any message
of the builder at level ERROR makes it fail, except the one about a missing driver.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import tensorrt_rtx as trt

_NO_DRIVER = "cudaError 35"


class Log(trt.ILogger):
    """Keeps what is said at level ERROR."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []

    def log(self, severity: trt.ILogger.Severity, message: str) -> None:
        """Called by the builder."""
        if severity <= trt.ILogger.Severity.ERROR and _NO_DRIVER not in message:
            self.errors.append(message)


def main() -> None:
    """Parse, then build."""
    path, arch, profile = sys.argv[1:4]
    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(path):
        told = [parser.get_error(index) for index in range(parser.num_errors)]
        sys.exit("; ".join(f"{e.node_operator()} {e.node_name()}: {e.desc()}" for e in told) or "it does not parse")
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, arch.upper()), 0)
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, 2 << 30)
    shapes = builder.create_optimization_profile()
    for name, three in json.loads(profile).items():
        shapes.set_shape(name, *three)
    config.add_optimization_profile(shapes)
    plan = builder.build_serialized_network(network, config)
    if plan is None or log.errors:
        sys.exit("; ".join(log.errors) or "no plan was built")
    types: Counter[str] = Counter()
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type in (trt.LayerType.MATRIX_MULTIPLY, trt.LayerType.CONVOLUTION):
            types[f"{layer.type.name.lower()} {layer.get_output_type(0).name.lower()}"] += 1
        elif layer.type in (trt.LayerType.QUANTIZE, trt.LayerType.DEQUANTIZE):
            types[layer.type.name.lower()] += 1
    print(json.dumps({"bytes": plan.nbytes, "layers": dict(sorted(types.items()))}))


if __name__ == "__main__":
    main()
