"""Run the recipe's own module in PyTorch: what every other engine is compared with."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from vbpipe.core import Artifact, Backend, Dialect, Meta, Run, Spec
from vbpipe.errors import EngineError
from vbpipe_stages._interface import Interface
from vbpipe_stages._reference import FILE, OUTPUTS, Reference
from vbpipe_stages._user_code import installed


class Eager(Spec):
    """PyTorch without any compiler. Its engine is a description of the model, so it opens only with the recipe."""

    name: ClassVar[str] = "eager"
    source: ClassVar[str] = "reference"
    runs: ClassVar[frozenset[str]] = frozenset({"reference", "engine"})
    dialect: ClassVar[Dialect] = "standard"

    def unavailable(self) -> str | None:
        """Return that torch is not installed, or None."""
        from vbpipe_stages._torch_model import unavailable

        return unavailable()

    def fingerprint(self) -> Mapping[str, str]:
        """Return torch's version."""
        return {"torch": installed("torch")}

    def build(self, source: Artifact, out: Path, threads: int) -> Meta:
        """Copy the description of the model."""
        del threads
        for name in (FILE, OUTPUTS):
            shutil.copyfile(source.path / name, out / name)
        reference = Reference.read(source.path)
        Interface.of(reference.model).write(out)
        return {"parameters": reference.parameters}

    @contextmanager
    def open(self, kind: str, path: Path, threads: int, root: Path | None = None) -> Iterator[Run]:
        """Build the model from its factory under `root`.

        Raises:
            EngineError: no `root`, or another kind than those it runs.
        """
        from vbpipe_stages import _torch_model

        if kind not in self.runs:
            raise EngineError(f"backend 'eager' does not run {kind!r} artifacts.", where=str(path))
        if root is None:
            raise EngineError(
                "an eager engine needs the recipe's folder: its model is the recipe's own code.", where=str(path)
            )
        reference = Reference.read(path)
        model = reference.model
        interface = Interface.of(model)
        loaded = _torch_model.load(model, root, clone_inputs=bool(reference.changes_inputs))
        with _torch_model.opened(loaded.adapter, interface, threads) as run:
            del loaded
            yield run


PLUGIN: type[Backend] = Eager
