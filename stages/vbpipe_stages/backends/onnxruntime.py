"""ONNX Runtime: graphs optimized once, ahead of time, and opened as they were written."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import field_validator

from vbpipe.core import Artifact, Backend, Dialect, Meta, Run, Spec, TracedNode
from vbpipe.errors import EngineError
from vbpipe_stages import (
    _computed_types,
    _interface,
    _onnx_graph,
    _processor,
    _product_rates,
    _provenance,
    _simulate,
    _trace,
)

if TYPE_CHECKING:
    import numpy as np
    import onnxruntime

    Array = np.ndarray[Any, Any]

_SHORT = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "tensorrt_rtx": "NvTensorRTRTXExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "rocm": "ROCMExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "xnnpack": "XnnpackExecutionProvider",
}
_COMPILES = ("TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider", "OpenVINOExecutionProvider")
"""Providers that compile parts of the graph in memory, which ONNX Runtime can't write back into a graph."""

_DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-rocm")


class OnnxRuntime(Spec):
    """Options are those of a session. A provider that ONNX Runtime would silently drop is an error."""

    name: ClassVar[str] = "onnxruntime"
    source: ClassVar[str] = "onnx"
    runs: ClassVar[frozenset[str]] = frozenset({"onnx", "engine"})
    dialect: ClassVar[Dialect] = "onnxruntime"

    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    """First choice first: ONNX Runtime's names or cpu, cuda, tensorrt, …; the processor always takes what is left."""
    provider_options: Mapping[str, Mapping[str, str]] = {}
    """Provider to its options."""
    spinning: bool = True
    """Whether idle threads spin while they wait: lower latency alone, trouble for everything else on the machine."""
    as_defined: bool = False
    """Compute every operator as ONNX defines it, half types rounded wherever they are made: slow, and free of this
    processor's own kernels, which may saturate or lack a type. For graphs that are meant for another device."""

    @field_validator("providers", mode="before")
    @classmethod
    def _full_names(cls, value: Any) -> Any:
        return tuple(_SHORT.get(name, name) for name in value) if isinstance(value, list | tuple) else value

    @field_validator("provider_options", mode="before")
    @classmethod
    def _full_keys(cls, value: Any) -> Any:
        return (
            {_SHORT.get(name, name): options for name, options in value.items()}
            if isinstance(value, Mapping)
            else value
        )

    def unavailable(self) -> str | None:
        if importlib.util.find_spec("onnxruntime") is None:
            return "onnxruntime is not installed; add it with: pip install onnxruntime"
        if self.providers == (_SHORT["cpu"],):
            return None  # every build has it, and asking would import the whole library
        import onnxruntime

        missing = [name for name in self.providers if name not in onnxruntime.get_available_providers()]
        if not missing:
            return None
        return (
            f"this onnxruntime has no {missing[0]}; it has {', '.join(onnxruntime.get_available_providers())}. "
            f"Install the package that brings it, such as: pip install onnxruntime-gpu"
        )

    def fingerprint(self) -> Mapping[str, str]:
        # The highest optimization level writes this processor's blocked layout and its preferred signs into the graph.
        return {
            "onnxruntime": _version(),
            "machine": platform.machine(),
            "nchwc_block": _processor.nchwc_block(),
        }

    def build(self, source: Artifact, out: Path, threads: int) -> Meta:
        """Write the graph as ONNX Runtime would run it, so that opening it does no such work again.

        Where a provider compiles in memory, the graph is kept as it is and compiled on opening.

        Raises:
            EngineError: the graph is bad, or a provider that was asked for was not used.
        """
        _onnx_graph.check_files(source.path)
        used = self._optimize(source.path, out, threads)
        _onnx_graph.copy_files(source.path, out, (_interface.FILE, _provenance.FILE))
        _trace_into(source.path, out)
        return {**_contents(out), "providers": used, "optimized": not self._compiles()}

    @classmethod
    def adopt(cls, file: Path, out: Path, inputs: Mapping[str, Array]) -> None:
        """Make an "onnx" artifact in the empty directory `out` of somebody's ONNX file, for inputs like these.

        Raises:
            EngineError: it is no graph that can be loaded, or takes other inputs.
        """
        import onnx
        from google.protobuf.message import DecodeError

        try:
            graph = onnx.load(str(file))
        except (DecodeError, OSError, ValueError, onnx.checker.ValidationError) as error:
            raise EngineError(f"it is no ONNX graph ({_first_line(error)}).", where=str(file)) from error
        weights = {value.name for value in graph.graph.initializer}
        taken = [value.name for value in graph.graph.input if value.name not in weights]
        if sorted(taken) != sorted(inputs):
            raise EngineError(f"it takes {taken}, not {sorted(inputs)}.", where=str(file), hint="Correct --inputs.")
        _onnx_graph.write(graph, out)
        _interface.Interface.fixed(inputs, [value.name for value in graph.graph.output]).write(out)

    @contextmanager
    def open(self, kind: str, path: Path, threads: int, root: Path | None = None) -> Iterator[Run]:
        """Open a session; what `build` wrote is taken as it is, an "onnx" artifact is optimized first.

        Raises:
            EngineError: it can't be loaded, or a provider that was asked for was not used.
        """
        del root
        if kind not in self.runs:
            raise EngineError(f"backend {self.name!r} does not run {kind!r} artifacts.", where=str(path))
        interface = _interface.Interface.read(path)
        _onnx_graph.check_files(path)
        state: dict[str, onnxruntime.InferenceSession] = {"session": self._opened(kind, path, threads)}
        taken = _checked_names(state["session"], interface, path)

        def run(arrays: Mapping[str, Array]) -> dict[str, Array]:
            if "session" not in state:
                raise EngineError("it was closed.", where=str(path), hint="Run inside the `with` block that opened it.")
            interface.check(arrays)
            try:
                values = state["session"].run(list(interface.outputs), {name: arrays[name] for name in taken})
            except _errors() as error:
                raise EngineError(f"ONNX Runtime failed: {_first_line(error)}", where=str(path)) from error
            return dict(zip(interface.outputs, values, strict=True))

        try:
            yield run
        finally:
            state.clear()

    def nodes(self, path: Path) -> tuple[TracedNode, ...]:
        """Return the nodes of a graph or engine with the modules that they compute."""
        return _trace.read_nodes(path)

    def precisions(self, path: Path) -> Mapping[str, tuple[str, ...]]:
        """Return module to the types that its operators with weights compute in, see `Inspectable`."""
        return _computed_types.computed(path)

    def ceilings(self, threads: int) -> Mapping[str, float]:
        """Return the best rates of matrix products: fp32 in GFLOP/s, int8_u8s8 and int8_s8s8 in Gop/s.

        Raises:
            EngineError: onnx is missing, or a provider that was asked for was not used.
        """
        return _product_rates.best_rates(lambda path: self._session(path, threads, optimize=True))

    def _opened(self, kind: str, path: Path, threads: int) -> onnxruntime.InferenceSession:
        if not self.as_defined:
            return self._session(path, threads, optimize=kind != "engine" or self._compiles())
        if not _simulate.computes_in_half(path):
            return self._session(path, threads, optimize=False)
        with TemporaryDirectory(prefix="vbpipe-") as folder:
            _onnx_graph.write(_simulate.in_float(_onnx_graph.read(path))[0], Path(folder))
            return self._session(Path(folder), threads, optimize=False)

    def _optimize(self, source: Path, out: Path, threads: int) -> list[str]:
        if self._compiles():
            _onnx_graph.copy_files(source, out, (_onnx_graph.MODEL, _onnx_graph.DATA))
            return list(self._session(source, threads, optimize=True).get_providers())
        written = out / _onnx_graph.MODEL
        session = self._session(source, threads, optimize=True, write_to=written)
        return list(session.get_providers())

    def _session(
        self, path: Path, threads: int, *, optimize: bool, write_to: Path | None = None
    ) -> onnxruntime.InferenceSession:
        import onnxruntime as ort

        reason = self.unavailable()
        if reason:
            raise EngineError(reason, where="providers")
        level = ort.GraphOptimizationLevel
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if self.spinning else "0")
        if write_to is not None:
            options.optimized_model_filepath = str(write_to)
            if (path / _onnx_graph.DATA).exists():
                options.add_session_config_entry(
                    "session.optimized_model_external_initializers_file_name", _onnx_graph.DATA
                )
        try:
            session = ort.InferenceSession(
                str(path / _onnx_graph.MODEL), options, providers=list(self.providers), provider_options=self._options()
            )
        except _errors() as error:
            raise EngineError(
                f"ONNX Runtime can't load it: {_first_line(error)}", where=str(path / _onnx_graph.MODEL)
            ) from error
        _refuse_fallback(self.providers, session.get_providers())
        return session

    def _options(self) -> list[dict[str, str]]:
        return [dict(self.provider_options.get(name, {})) for name in self.providers]

    def _compiles(self) -> bool:
        return any(name in _COMPILES for name in self.providers)


def _version() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "absent"


def _trace_into(source: Path, out: Path) -> None:
    """Write down which modules each node of the optimized graph computes; without onnx, what the source said stays."""
    if importlib.util.find_spec("onnx") is None or not (source / _provenance.FILE).exists():
        return
    import onnx

    before, after = (onnx.load(str(path / _onnx_graph.MODEL), load_external_data=False) for path in (source, out))
    _trace.carried(_provenance.Provenance.read(source), before, after).write(out)


def _contents(out: Path) -> dict[str, Any]:
    if importlib.util.find_spec("onnx") is None:
        return {}
    import onnx

    counts = _onnx_graph.operators(onnx.load(str(out / _onnx_graph.MODEL), load_external_data=False))
    return {"nodes": sum(counts.values()), "operators": counts}


def _checked_names(session: onnxruntime.InferenceSession, interface: _interface.Interface, path: Path) -> list[str]:
    """Return the inputs that the graph reads; one that it never used may be gone from it."""
    outputs = {value.name for value in session.get_outputs()}
    inputs = [value.name for value in session.get_inputs()]
    lost = [name for name in interface.outputs if name not in outputs] + [
        n for n in inputs if n not in interface.inputs
    ]
    if lost:
        raise EngineError(
            f"the graph and {_interface.FILE} disagree on {lost[0]!r}.",
            where=str(path),
            hint="Build the artifact again.",
        )
    return inputs


def _refuse_fallback(asked: tuple[str, ...], used: list[str]) -> None:
    dropped = [name for name in asked if name not in used]
    if dropped:
        raise EngineError(
            f"ONNX Runtime did not use {dropped[0]} and would have run on {', '.join(used)}.",
            where="providers",
            hint="Its libraries are most likely missing or do not fit the driver; or take it out of `providers`.",
        )


def _errors() -> tuple[type[Exception], ...]:
    """Return what sessions raise: ONNX Runtime's own exceptions share no base class but Exception."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    own = [value for value in vars(state).values() if isinstance(value, type) and issubclass(value, Exception)]
    return (*own, RuntimeError, ValueError, OSError)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:500]


PLUGIN: type[Backend] = OnnxRuntime
