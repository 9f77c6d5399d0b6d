"""A stage that does what its options say: writes, fails, hangs, dies."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from vbpipe.core import Inputs, Meta, Site, Spec, Stage
from vbpipe.errors import VbpipeError
from vbpipe.recipe.model import Recipe, Target


class Fake(Spec):
    """Joins no chain by itself: tests put it into plans."""

    name: ClassVar[str] = "fake"
    version: ClassVar[int] = 1
    scope: ClassVar[Literal["chain", "each", "target"]] = "chain"
    after: ClassVar[tuple[str, ...]] = ()

    step: str
    reads: tuple[str, ...] = ()
    does: str = "write"
    text: str = ""
    seconds: float = 0.0
    diary: str = ""
    """A file that gets a line when the step begins its work: how tests count what was done."""

    @classmethod
    def configure(cls, recipe: Recipe, target: Target) -> tuple[Stage, ...]:
        return ()

    def label(self) -> str:
        return self.step

    def consumes(self) -> frozenset[str]:
        return frozenset(self.reads)

    def produces(self) -> str:
        return self.step

    def fingerprint(self, root: Path) -> Mapping[str, str]:
        return {}

    def run(self, inputs: Inputs, out: Path, site: Site) -> Meta:
        if self.diary:
            with Path(self.diary).open("a") as diary:
                diary.write(self.step + "\n")
        site.progress(0.5, "half way")
        print("the step's own words")
        time.sleep(self.seconds)
        if self.does == "raise":
            raise ValueError("a plug-in's own bug")
        if self.does == "refuse":
            raise VbpipeError("it can't be done.", where="here", hint="Do that instead.")
        if self.does == "abort":
            os.abort()
        if self.does == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.does == "exit":
            os._exit(0)
        if self.does == "full":
            raise OSError(28, "No space left on device")
        if self.does == "orphan":
            child = subprocess.Popen(["sleep", "30"])
            with Path(self.diary).open("a") as diary:
                diary.write(f"{child.pid}\n")
            os.abort()
        if self.does == "nothing":
            return {}
        read = "".join((inputs[kind].path / "out.txt").read_text() for kind in sorted(self.reads))
        (out / "out.txt").write_text(f"{self.step}{self.text}({read})")
        return {"does": self.does}


PLUGIN: type[Stage] = Fake
