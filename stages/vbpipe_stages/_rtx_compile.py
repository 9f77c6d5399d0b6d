"""The process that compiles one graph with TensorRT for RTX: `python -m vbpipe_stages._rtx_compile JOB`.

In a process of its own, because the compiler ends the process on some inputs, can't be stopped while it generates code,
and writes part of its reasons to the process's standard error.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vbpipe.core import Spec
from vbpipe.processes import die_with

if TYPE_CHECKING:
    import tensorrt_rtx

_NO_DRIVER = "cudaError 35"
"""Of a host without a driver, where everything that needs none goes on."""


_ASK, _NO_RANDOMIZE = 0xFFFFFFFF, 0x0040000
"""Of personality(2): to ask, and ADDR_NO_RANDOMIZE."""


class CompileJob(Spec):
    """What to compile, for whom, and where the results go."""

    parent: int
    model: Path
    plan: Path
    facts: Path
    """Where the `Facts` go, whatever happens."""
    archs: tuple[str, ...]
    """"sm86"; empty: what the compiler takes for portable."""
    profile: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
    """Input to its smallest, usual and largest shape; empty for a graph without dynamic shapes."""
    workspace_mib: int
    memory_limit_mib: int | None = None


class Layer(Spec):
    """One layer of the network as it was parsed."""

    name: str
    kind: str
    node: str
    """The ONNX node that it is from; "" where the parser doesn't say."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Of the outputs."""


class Facts(Spec):
    """What became of a job."""

    errors: tuple[str, ...] = ()
    """Empty where the plan is good."""
    warnings: tuple[str, ...] = ()
    layers: tuple[Layer, ...] = ()
    inputs: dict[str, tuple[int, ...]] = {}
    """Input to its shape as parsed, -1 where it is dynamic."""
    reproducible: bool = False
    """Whether another build of the same job gives the same bytes."""


def main(arguments: list[str]) -> int:
    """Run the job in the file named by the one argument; 0 when the plan is written."""
    job = CompileJob.model_validate_json(Path(arguments[0]).read_bytes())
    die_with(job.parent)
    fixed = _fix_addresses()
    if job.memory_limit_mib is not None:
        limit = job.memory_limit_mib * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    plan, facts = _compile(job)
    if plan is not None and not facts.errors:
        job.plan.write_bytes(plan)
    facts = facts.model_copy(update={"reproducible": fixed})
    temporary = job.facts.with_suffix(".part")
    temporary.write_text(facts.model_dump_json(), encoding="utf-8")
    os.replace(temporary, job.facts)  # noqa: PTH105  # a reader sees all of it or nothing
    return 1 if facts.errors else 0


def _fix_addresses() -> bool:
    """Start this process again without randomized addresses, unless it is so; return whether it is.

    The compiler orders things by their addresses: with random ones its plans differ from build to build, as tried with
    1.7.1. Some containers forbid the change (personality(2)).
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    now = libc.personality(_ASK)
    if now & _NO_RANDOMIZE:
        return True
    if now < 0 or libc.personality(now | _NO_RANDOMIZE) < 0 or not libc.personality(_ASK) & _NO_RANDOMIZE:
        return False
    os.execv(sys.executable, sys.orig_argv)  # noqa: S606  # itself, with the arguments that it was given
    return True


def _compile(job: CompileJob) -> tuple[bytes | None, Facts]:
    import tensorrt_rtx as trt

    log = _log()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(job.model)) or not network.num_layers:
        told = [_parser_error(parser.get_error(index)) for index in range(parser.num_errors)]
        return None, Facts(errors=tuple(told or log.errors or ["its parser found no layer in the graph"]))
    layers = tuple(_layer(network.get_layer(index)) for index in range(network.num_layers))
    given = (network.get_input(index) for index in range(network.num_inputs))
    inputs = {tensor.name: tuple(tensor.shape) for tensor in given}
    _let_decompose(network)
    config = _config(job, builder)
    _log_progress(f"parsed {network.num_layers} layers")
    made = builder.build_serialized_network(network, config)
    errors = list(log.errors)
    if made is None and not errors:
        errors.append("it built no plan and gave no reason")
    plan = None if made is None else bytes(made)
    return plan, Facts(errors=tuple(errors), warnings=tuple(log.warnings), layers=layers, inputs=inputs)


def _config(job: CompileJob, builder: tensorrt_rtx.Builder) -> tensorrt_rtx.IBuilderConfig:
    import tensorrt_rtx as trt

    config = builder.create_builder_config()
    if job.archs:
        config.num_compute_capabilities = len(job.archs)
        for index, arch in enumerate(job.archs):
            config.set_compute_capability(getattr(trt.ComputeCapability, arch.upper()), index)
    # It is written into the plan, and bounds what a server gives it; the default is this host's own memory.
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, job.workspace_mib * 2**20)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if job.profile:
        shapes = builder.create_optimization_profile()
        for name, three in job.profile.items():
            shapes.set_shape(name, *three)
        config.add_optimization_profile(shapes)
    return config


def _let_decompose(network: tensorrt_rtx.INetworkDefinition) -> None:
    """Let attention be computed by products and a softmax where no kernel of its own fits: in float32 none does."""
    import tensorrt_rtx as trt

    kind = getattr(trt.LayerType, "ATTENTION_INPUT", None)
    for index in range(network.num_layers if kind is not None else 0):
        layer = network.get_layer(index)
        if layer.type == kind:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True


def _log() -> Any:
    import tensorrt_rtx as trt

    class Log(trt.ILogger):  # type: ignore[misc]  # the SDK is untyped
        """Keeps what is said at level WARNING and above; passes all that on to standard error."""

        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []
            self.warnings: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity > trt.ILogger.Severity.WARNING or _NO_DRIVER in message:
                return
            serious = severity <= trt.ILogger.Severity.ERROR
            (self.errors if serious else self.warnings).append(message)
            _log_progress(f"{'error' if serious else 'warning'}: {message}")

    return Log()


def _log_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  # the log of this process


def _parser_error(error: tensorrt_rtx.ParserError) -> str:
    # `desc` says no more than "false" for an operator that the parser doesn't have.
    why = error.desc() if error.desc() not in ("", "false") else f"unsupported ({error.func()})"
    return f"{error.node_operator()} {error.node_name()}: {why}"


def _layer(layer: tensorrt_rtx.ILayer) -> Layer:
    found = [layer.get_input(index) for index in range(layer.num_inputs)]
    made = [layer.get_output(index) for index in range(layer.num_outputs)]
    return Layer(
        name=layer.name,
        kind=layer.type.name.lower(),
        node=_node(layer.metadata),
        inputs=tuple("" if tensor is None else tensor.name for tensor in found),
        outputs=tuple(tensor.name for tensor in made),
        dtypes=tuple(tensor.dtype.name.lower() for tensor in made),
    )


def _node(metadata: str) -> str:
    """Return the node's name of "[ONNX Layer: name]"."""
    marked = metadata.partition("[ONNX Layer: ")[2]
    return marked.partition("]")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
