"""TensorRT for RTX: engines for NVIDIA GPUs, compiled ahead of time on a host that needs no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from vbpipe.core import Artifact, Backend, Dialect, Meta, Run, Spec, TracedNode
from vbpipe.errors import EngineError
from vbpipe.processes import describe_exit, environment, python_command
from vbpipe_stages import _cuda, _interface, _onnx_graph, _provenance, _rtx_network
from vbpipe_stages._rtx_compile import CompileJob, Facts

PLAN = "model.plan"
MAGIC = b"vtrt"
"""How its plans begin, as tried with 1.7.1; bytes 16 to 23 are their length."""

Arch = Literal["sm75", "sm80", "sm86", "sm89", "sm120", "sm121"]
"""What 1.7.1 compiles for. There is no sm90 among them: Hopper takes TensorRT itself."""


class TensorRtRtx(Spec):
    """Strongly typed: the graph says what is computed in which type. Equal inputs give equal bytes."""

    name: ClassVar[str] = "tensorrt_rtx"
    source: ClassVar[str] = "onnx"
    runs: ClassVar[frozenset[str]] = frozenset({"engine"})
    dialect: ClassVar[Dialect] = "tensorrt"

    arch: Arch | None = None
    """From the target. Without one the engine is for what the compiler calls portable: 8.0, 8.6, 8.9 and 12.0."""
    also: tuple[Arch, ...] = ()
    """Further architectures that the same engine is for."""
    workspace_mib: Annotated[int, Field(ge=1)] = 4096
    """The most device memory that an engine may take for activations and scratch; it is part of the engine."""
    timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """A compiler that takes longer is killed."""
    memory_limit_mib: Annotated[int, Field(ge=256)] | None = None
    """The most address space that the compiler may take; no limit when absent."""

    @field_validator("arch", "also", mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        for arch in value if isinstance(value, list | tuple) else (value,):
            if arch == "sm90":
                raise ValueError("TensorRT for RTX has no SM90; Hopper takes TensorRT itself")
        return value

    def unavailable(self) -> str | None:
        if importlib.util.find_spec("tensorrt_rtx") is None:
            return "tensorrt_rtx is not installed; add it with: pip install 'vbpipe[rtx]'"
        if importlib.util.find_spec("onnx") is None:
            return "onnx is not installed; add it with: pip install onnx"
        return None

    def pending(self) -> str | None:
        if any(arch in _cuda.architectures() for arch in self._archs()):
            return "a runner for TensorRT for RTX engines, which vbpipe does not have yet"
        return f"{' or '.join(f'an {arch.upper()}' for arch in self._archs()) or 'an NVIDIA'} GPU"

    def fingerprint(self) -> Mapping[str, str]:
        try:
            return {"tensorrt_rtx": version("tensorrt_rtx")}
        except PackageNotFoundError:
            return {"tensorrt_rtx": "absent"}

    def build(self, source: Artifact, out: Path, threads: int) -> Meta:
        """Compile in a process of its own; any message of the compiler at level ERROR is a failure.

        Raises:
            EngineError: the graph does not parse or build, an input's dynamic axis became fixed, or the compiler died,
                took too long or too much memory.
        """
        _onnx_graph.check_files(source.path)
        interface = _interface.Interface.read(source.path)
        with tempfile.TemporaryDirectory(prefix="vbpipe-rtx-") as scratch:
            facts = self._compile(source.path, interface, out / PLAN, Path(scratch), threads)
        _check_inputs(interface, facts)
        size = _check_plan(out / PLAN)
        _onnx_graph.copy_files(source.path, out, (_interface.FILE, _provenance.FILE))
        _rtx_network.write(facts.layers, source.path, out)
        return {
            "archs": list(self._archs()) or ["portable"],
            "tensorrt_rtx": self.fingerprint()["tensorrt_rtx"],
            "plan_bytes": size,
            "reproducible": facts.reproducible,
            "layers": len(facts.layers),
            "kinds": _rtx_network.count_types(facts.layers),
            "compiler_warnings": sorted(set(facts.warnings)),
        }

    def open(self, kind: str, path: Path, threads: int, root: Path | None = None) -> AbstractContextManager[Run]:
        """Refuse: this host can't run such engines; raises EngineError that says what it takes."""
        if kind not in self.runs:
            raise EngineError(f"backend {self.name!r} does not run {kind!r} artifacts.", where=str(path))
        raise EngineError(f"pending: to run it needs {self.pending()}.", where=str(path))

    def nodes(self, path: Path) -> tuple[TracedNode, ...]:
        """Return the layers of an engine, as parsed, with the modules that they compute."""
        return _rtx_network.nodes(path)

    def precisions(self, path: Path) -> Mapping[str, tuple[str, ...]]:
        """Return module to the types that its operators with weights compute in, as parsed (see `Inspectable`).

        The network is strongly typed, so that is what the engine computes in; what was fused can't be seen without a
        GPU.
        """
        return _rtx_network.precisions(path)

    def _archs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*([self.arch] if self.arch else []), *self.also]))

    def _compile(self, source: Path, interface: _interface.Interface, plan: Path, scratch: Path, threads: int) -> Facts:
        job = CompileJob(
            parent=os.getpid(),
            model=source / _onnx_graph.MODEL,
            plan=plan,
            facts=scratch / "facts.json",
            archs=self._archs(),
            profile=_profile(interface),
            workspace_mib=self.workspace_mib,
            memory_limit_mib=self.memory_limit_mib,
        )
        asked, log = scratch / "job.json", scratch / "log.txt"
        asked.write_text(job.model_dump_json(), encoding="utf-8")
        with log.open("wb") as written:
            code = self._wait(python_command("vbpipe_stages._rtx_compile", str(asked)), written.fileno(), threads)
        said = log.read_text(encoding="utf-8", errors="replace")
        sys.stderr.write(said)
        if not job.facts.exists():
            how = f"the compiler failed: {describe_exit(code, self.memory_limit_mib, said[-4000:])}"
            raise EngineError(how, where=f"backend {self.name}", hint=_last_line(said))
        facts = Facts.model_validate_json(job.facts.read_bytes())
        if facts.errors:
            raise EngineError(f"TensorRT for RTX can't build it: {facts.errors[0][:600]}", where=f"backend {self.name}")
        return facts

    def _wait(self, command: list[str], log: int, threads: int) -> int:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(environment(threads))
        ) as process:
            try:
                return process.wait(self.timeout_s)
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise EngineError(
                    f"the compiler took longer than {self.timeout_s:g} s and was stopped.",
                    where=f"backend {self.name}",
                    hint="Raise `timeout_s` in the target's options.",
                ) from error
            except BaseException:
                process.kill()
                raise


def _profile(interface: _interface.Interface) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Return each dynamic input's smallest, usual and largest shape."""
    found = {}
    for name, spec in interface.inputs.items():
        if not any(isinstance(size, str) for size in spec.shape):
            continue
        ends = [interface.shapes[size] if isinstance(size, str) else None for size in spec.shape]
        fixed = [0 if isinstance(size, str) else size for size in spec.shape]
        found[name] = (
            tuple(end.min if end else size for end, size in zip(ends, fixed, strict=True)),
            tuple(end.opt if end else size for end, size in zip(ends, fixed, strict=True)),
            tuple(end.max if end else size for end, size in zip(ends, fixed, strict=True)),
        )
    return found


def _check_inputs(interface: _interface.Interface, facts: Facts) -> None:
    """Raise where an axis that must be dynamic is not: such an engine runs at the size of the export only."""
    for name, shape in facts.inputs.items():
        wanted = interface.inputs[name].shape if name in interface.inputs else ()
        for axis, (size, symbol) in enumerate(zip(shape, wanted, strict=False)):
            if isinstance(symbol, str) and size != -1 and interface.shapes[symbol].min != interface.shapes[symbol].max:
                raise EngineError(
                    f"axis {axis} of input {name!r} is fixed at {size}, and must take every {symbol!r}.",
                    where="model.inputs",
                    hint="The export lost the dynamic axis.",
                )


def _check_plan(path: Path) -> int:
    """Return the plan's size; raise for a file that is none, or is cut."""
    size = path.stat().st_size if path.exists() else 0
    with path.open("rb") as file:
        head = file.read(24)
    if head[:4] != MAGIC or int.from_bytes(head[16:24], "little") != size:
        raise EngineError("the compiler wrote no whole plan.", where=str(path))
    return size


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


PLUGIN: type[Backend] = TensorRtRtx
