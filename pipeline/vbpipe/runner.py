"""Which backend runs an artifact of a given kind on a given target."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from vbpipe import plugins
from vbpipe.core import Backend, Run, Spec
from vbpipe.errors import EngineError, UsageError
from vbpipe.recipe.model import Target

_OWN: Mapping[str, str] = {"reference": "eager", "torchscript": "torchscript", "onnx": "onnxruntime"}
"""The backend that runs a kind when the target's own backend does not."""


class Runner(Spec):
    """A backend with its options: everything that decides how an artifact is run."""

    backend: str
    options: Mapping[str, Any] = {}
    threads: Annotated[int, Field(ge=1)] = 1


def runner_for(kind: str, target: Target) -> Runner:
    """Return who runs artifacts of `kind` for `target`.

    The reference always runs in plain eager, whatever the target's options. Everything else runs on the target's
    backend where that one takes the kind, so that a step is compared with the next on the same runtime.

    Raises:
        UsageError: no backend runs the kind, or the target names a backend that does not exist.
    """
    if kind != "reference" and kind in plugins.backend(target.backend).runs:
        return Runner(backend=target.backend, options=target.options, threads=target.threads)
    if kind not in _OWN:
        raise UsageError(f"backend {target.backend!r} does not run {kind!r} artifacts.", where="targets")
    return Runner(backend=_OWN[kind], threads=target.threads)


def own_runner(kind: str) -> Runner | None:
    """Return who runs artifacts of `kind` where no target is asked; None for kinds that a target's backend runs."""
    return Runner(backend=_OWN[kind]) if kind in _OWN else None


def configured(runner: Runner) -> Backend:
    """Return the backend with its options set; raises UsageError for options that it doesn't have."""
    cls = plugins.backend(runner.backend)
    assert issubclass(cls, BaseModel), "a backend is a Spec: its fields are its options"
    try:
        return cls.model_validate(dict(runner.options))
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
