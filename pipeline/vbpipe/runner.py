"""Which backend runs an artifact of a given kind on a given target."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from vbpipe import plugins
from vbpipe.core import Backend, Placed, Run, Spec
from vbpipe.errors import EngineError, UsageError
from vbpipe.recipe.model import Target


class Runner(Spec):
    """A backend with its options: everything that decides how an artifact is run."""

    backend: str
    options: Mapping[str, Any] = {}
    threads: Annotated[int, Field(ge=1)] = 1
    arch: str | None = None
    """The device that engines are for, where that is not this host's."""


_OWN: Mapping[str, Runner] = {
    "reference": Runner(backend="eager"),
    "torchscript": Runner(backend="torchscript"),
    "onnx": Runner(backend="onnxruntime"),
}
"""Who runs a kind when the target's own backend does not."""

_DEFINING: Mapping[str, Runner] = {**_OWN, "onnx": Runner(backend="onnxruntime", options={"as_defined": True})}
"""Who runs a kind as its format defines it: a processor's own kernels, which may saturate or lack a type, must not
decide whether a graph is right that may be meant for another device."""


def runner_for(kind: str, target: Target) -> Runner:
    """Return who runs artifacts of `kind` for `target`.

    The reference always runs in plain eager, whatever the target's options. Everything else runs on the target's
    backend where that one takes the kind, so that a step is compared with the next on the same runtime.

    Raises:
        UsageError: no backend runs the kind, or the target names a backend that does not exist.
    """
    if kind != "reference" and kind in plugins.backend(target.backend).runs:
        return engine_runner(target)
    if kind not in _OWN:
        raise UsageError(f"backend {target.backend!r} does not run {kind!r} artifacts.", where="targets")
    elsewhere = plugins.backend(target.backend).dialect == "tensorrt"
    return (_DEFINING if elsewhere else _OWN)[kind].model_copy(update={"threads": target.threads})


def engine_runner(target: Target) -> Runner:
    """Return who builds and runs the engines of `target`."""
    return Runner(backend=target.backend, options=target.options, threads=target.threads, arch=target.arch)


def own_runner(kind: str) -> Runner | None:
    """Return who runs artifacts of `kind` where no target is asked; None for kinds that a target's backend runs."""
    return _OWN.get(kind)


def defining_runner(kind: str) -> Runner | None:
    """Return who runs artifacts of `kind` as their format defines it; None for kinds that a target's backend runs."""
    return _DEFINING.get(kind)


def pending_on(target: Target) -> str | None:
    """Return what the engines of `target` need and this host lacks; None where they run here.

    Raises:
        UsageError: the target's options are wrong.
    """
    backend = configured(engine_runner(target))
    return backend.pending() if isinstance(backend, Placed) else None


def configured(runner: Runner) -> Backend:
    """Return the backend with its options set; raises UsageError for options that it doesn't have."""
    cls = plugins.backend(runner.backend)
    assert issubclass(cls, BaseModel), "a backend is a Spec: its fields are its options"
    placed = {"arch": runner.arch} if runner.arch is not None and "arch" in cls.model_fields else {}
    try:
        return cls.model_validate({**runner.options, **placed})
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UsageError(found, where=f"backend {runner.backend}", hint="Correct the target's options.") from error


def open_runner(runner: Runner, kind: str, path: Path, root: Path | None = None) -> AbstractContextManager[Run]:
    """Return the opened artifact directory `path` of `kind`, as a context manager that gives a Run.

    Args:
        root: the recipe's folder; needed for "reference" artifacts only.

    Raises:
        EngineError: the backend is not usable here, or can't open the artifact.
    """
    backend = configured(runner)
    reason = backend.unavailable()
    if reason:
        raise EngineError(reason, where=f"backend {runner.backend}")
    return backend.open(kind, path, runner.threads, root)
