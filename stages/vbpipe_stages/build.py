"""Compile a variant's newest graph into the engine of its target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from vbpipe import plugins
from vbpipe.core import Backend, Inputs, Inspectable, Meta, Site, Spec, Stage
from vbpipe.errors import VbpipeError
from vbpipe.recipe.model import Recipe, Target
from vbpipe.runner import Runner, configured
from vbpipe_stages._achieved import compare


class Build(Spec):
    """The backend decides how; it is named in the target."""

    name: ClassVar[str] = "build"
    version: ClassVar[int] = 2
    scope: ClassVar[Literal["chain", "each", "target"]] = "chain"
    after: ClassVar[tuple[str, ...]] = ("export", "fuse", "quantize")

    backend: str
    options: Mapping[str, Any] = {}
    arch: str | None = None
    """The device that the engine is for, where that is not this host's."""

    @classmethod
    def configure(cls, recipe: Recipe, target: Target) -> tuple[Stage, ...]:
        del recipe
        return (cls(backend=target.backend, options=target.options, arch=target.arch),)

    def label(self) -> str:
        return "engine"

    def consumes(self) -> frozenset[str]:
        return frozenset({plugins.backend(self.backend).source})

    def keeps(self) -> str:
        return plugins.backend(self.backend).source

    def produces(self) -> str:
        return "engine"

    def fingerprint(self, root: Path) -> Mapping[str, str]:
        del root
        return self._configured().fingerprint()

    def run(self, inputs: Inputs, out: Path, site: Site) -> Meta:
        """Compile, with the size in meta, and what became of the precision that was asked for.

        Raises:
            VbpipeError: the backend can't be used here, can't compile the graph, or computes nothing that was
                quantized in the type that it was quantized to.
        """
        backend = self._configured()
        reason = backend.unavailable()
        if reason:
            raise VbpipeError(reason, where=f"backend {self.backend}")
        meta = backend.build(inputs[backend.source], out, site.threads)
        size_bytes = sum(path.stat().st_size for path in sorted(out.rglob("*")) if path.is_file())
        if size_bytes == 0:
            raise VbpipeError("it wrote no engine.", where=f"backend {self.backend}")
        found = _precision(backend, out, inputs[backend.source].meta.get("modules", {}))
        return {**meta, **found, "backend": self.backend, "size_bytes": size_bytes}

    def _configured(self) -> Backend:
        return configured(Runner(backend=self.backend, options=self.options, arch=self.arch))


def _precision(backend: Backend, out: Path, asked: Mapping[str, str]) -> Meta:
    """Return what became of the types that modules were to compute in; empty where the engine can't be looked into."""
    if not asked or not isinstance(backend, Inspectable):
        return {}
    computed = backend.precisions(out)
    found = compare(asked, computed)
    if found.nothing:
        raise VbpipeError(
            f"{found.describe()}: quantizing had no effect.",
            where=f"backend {backend.name}",
            hint="Ask for a form that its kernels take, or leave the stage out; docs/reference/forms.md lists them.",
        )
    return {
        "achieved": {module: " and ".join(kinds) for module, kinds in sorted(computed.items()) if module in asked},
        "missed": dict(found.missed),
        "not_inspected": list(found.unknown),
        "warning": found.describe() or None,
    }


PLUGIN: type[Stage] = Build
