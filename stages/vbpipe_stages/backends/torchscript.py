"""Run TorchScript programs in PyTorch's own interpreter."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vbpipe.core import Artifact, Backend, Dialect, Meta, Run, Spec
from vbpipe.errors import EngineError
from vbpipe_stages._interface import Interface
from vbpipe_stages._user_code import installed

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = np.ndarray[Any, Any]

FILE = "model.pt"


class TorchScript(Spec):
    """Freeze a TorchScript program: weights become constants, and operators around them fold."""

    name: ClassVar[str] = "torchscript"
    source: ClassVar[str] = "torchscript"
    runs: ClassVar[frozenset[str]] = frozenset({"torchscript", "engine"})
    dialect: ClassVar[Dialect] = "standard"

    optimize: bool = False
    """Also run `optimize_for_inference`: convolutions take MKL-DNN's own layout, on the host that loads it."""

    def unavailable(self) -> str | None:
        """Return that torch is not installed, or None."""
        from vbpipe_stages._torch_model import unavailable

        return unavailable()

    def fingerprint(self) -> Mapping[str, str]:
        """Return torch's version."""
        return {"torch": installed("torch")}

    def build(self, source: Artifact, out: Path, threads: int) -> Meta:
        """Write the frozen program and its interface.

        Raises:
            EngineError: the source is no TorchScript program, or can't be frozen.
        """
        import torch

        from vbpipe_stages._torchscript_file import save

        del threads
        interface = Interface.read(source.path)
        program = _load(source.path / FILE)
        before = _nodes(program)
        try:
            frozen = torch.jit.freeze(program.eval())
        except RuntimeError as error:
            raise EngineError(f"torch.jit.freeze refuses it ({error}).", where=source.digest[:12]) from error
        save(frozen, out / FILE)
        interface.write(out)
        return {"nodes_before": before, "nodes": _nodes(frozen), "optimize": self.optimize}

    @classmethod
    def adopt(cls, file: Path, out: Path, inputs: Mapping[str, Array]) -> None:
        """Make a "torchscript" artifact in the empty directory `out` of somebody's own TorchScript file.

        The file is code, and is run here once on `inputs`, in their order, to see what it returns.

        Raises:
            EngineError: it is no TorchScript program, or fails on these inputs.
        """
        import torch

        program = _load(file).eval()
        try:
            with torch.inference_mode():
                found = program(*(torch.from_numpy(array) for array in inputs.values()))
        except (RuntimeError, TypeError, ValueError) as error:
            raise EngineError(f"it fails on these inputs ({str(error).splitlines()[0]}).", where=str(file)) from error
        count = 1 if isinstance(found, torch.Tensor) else len(found)
        shutil.copyfile(file, out / FILE)
        Interface.fixed(inputs, [f"output{index}" for index in range(count)]).write(out)

    @contextmanager
    def open(self, kind: str, path: Path, threads: int, root: Path | None = None) -> Iterator[Run]:
        """Load the program; raises EngineError for another kind, or a file that is none.

        A TorchScript file is code. It is opened from our own store or a checked bundle only.
        """
        import torch

        from vbpipe_stages import _torch_model

        del root
        if kind not in self.runs:
            raise EngineError(f"backend 'torchscript' does not run {kind!r} artifacts.", where=str(path))
        interface = Interface.read(path)
        program = _load(path / FILE).eval()
        if kind == "engine" and self.optimize:
            # Its layout belongs to this CPU and can't be saved, so it is chosen here, where the engine runs.
            program = torch.jit.optimize_for_inference(program)
        with _torch_model.opened(program, interface, threads) as run:
            del program
            yield run


def _load(path: Path) -> torch.jit.ScriptModule:
    import torch

    try:
        return torch.jit.load(str(path), map_location="cpu")
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise EngineError(f"it is no TorchScript program ({reason}).", where=str(path)) from error


def _nodes(program: torch.jit.ScriptModule) -> int:
    """Return how many nodes the program has with its submodules inlined."""
    return sum(1 for _ in program.inlined_graph.nodes())


PLUGIN: type[Backend] = TorchScript
