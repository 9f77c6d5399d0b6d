"""No engine runtime: the graph is kept as it is and interpreted with numpy, for hosts without any SDK."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vbpipe.core import Artifact, Backend, Dialect, Meta, Run, Spec
from vbpipe.errors import EngineError
from vbpipe_stages import _interface, _onnx_graph, _provenance

if TYPE_CHECKING:
    import numpy as np
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    Array = np.ndarray[Any, Any]

_FAILURES = (
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    ImportError,
)
"""What onnx's operators raise for a graph that they can't run; they share no base class."""


class Null(Spec):
    """Right but slow: every operator is onnx's own reference in numpy."""

    name: ClassVar[str] = "null"
    source: ClassVar[str] = "onnx"
    runs: ClassVar[frozenset[str]] = frozenset({"engine"})
    dialect: ClassVar[Dialect] = "standard"

    def unavailable(self) -> str | None:
        if importlib.util.find_spec("onnx") is None:
            return "onnx is not installed; add it with: pip install onnx"
        return None

    def fingerprint(self) -> Mapping[str, str]:
        return {"onnx": version("onnx")}

    def build(self, source: Artifact, out: Path, threads: int) -> Meta:
        """Copy the graph, once every operator in it is known to have a reference."""
        del threads
        counts = _onnx_graph.operators(_onnx_graph.read(source.path))
        _evaluator(source.path)
        names = (_onnx_graph.MODEL, _onnx_graph.DATA, _interface.FILE, _provenance.FILE)
        _onnx_graph.copy_files(source.path, out, names)
        return {"nodes": sum(counts.values()), "operators": counts}

    @contextmanager
    def open(self, kind: str, path: Path, threads: int, root: Path | None = None) -> Iterator[Run]:
        """Load the graph into the interpreter; raises EngineError where it can't."""
        del threads, root
        if kind not in self.runs:
            raise EngineError(f"backend {self.name!r} does not run {kind!r} artifacts.", where=str(path))
        interface = _interface.Interface.read(path)
        state = {"evaluator": _evaluator(path)}
        taken = [name for name in state["evaluator"].input_names if name in interface.inputs]

        def run(arrays: Mapping[str, Array]) -> dict[str, Array]:
            if "evaluator" not in state:
                raise EngineError("it was closed.", where=str(path), hint="Run inside the `with` block that opened it.")
            interface.check(arrays)
            # The interpreter may write into what it is given.
            copies = {name: arrays[name].copy() for name in taken}
            try:
                values = state["evaluator"].run(list(interface.outputs), copies)
            except _FAILURES as error:
                raise EngineError(f"onnx's interpreter failed: {error!r}", where=str(path)) from error
            return dict(zip(interface.outputs, values, strict=True))

        try:
            yield run
        finally:
            state.clear()


def _evaluator(path: Path) -> ReferenceEvaluator:
    from onnx.reference import ReferenceEvaluator

    model = _onnx_graph.read(path)
    try:
        return ReferenceEvaluator(model, new_ops=[_gather_elements()])
    except _FAILURES as error:
        raise EngineError(
            f"onnx's interpreter can't run it: {error!r}", where=str(path), hint="Build for a backend that has an SDK."
        ) from error


def _gather_elements() -> type[OpRun]:
    """Return GatherElements by numpy's own: onnx's (1.23) fails for more than 64 indices along the axis."""
    import numpy as np
    from onnx.reference.op_run import OpRun

    class GatherElements(OpRun):  # type: ignore[misc]  # onnx is untyped here
        def _run(self, data: Array, indices: Array, axis: int = 0) -> tuple[Array]:
            inside = np.where(indices < 0, indices + data.shape[axis], indices)
            narrow = tuple(slice(None) if at == axis % data.ndim else slice(n) for at, n in enumerate(inside.shape))
            return (np.take_along_axis(data[narrow], inside, axis=axis),)

    return GatherElements


PLUGIN: type[Backend] = Null
