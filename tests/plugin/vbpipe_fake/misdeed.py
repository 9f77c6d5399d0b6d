"""A stage that notes beside a graph what its engine is to do wrong, so that each variant of a recipe can choose."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from vbpipe.core import Inputs, Meta, Site, Spec, Stage
from vbpipe.recipe.model import Recipe, Target

NOTE = "misdeed.json"


class Misdeed(Spec):
    """Copies the graph; backend `misbehaving` reads the note. It makes no row: no backend runs its kind."""

    name: ClassVar[str] = "misdeed"
    version: ClassVar[int] = 1
    scope: ClassVar[Literal["chain", "each", "target"]] = "chain"
    after: ClassVar[tuple[str, ...]] = ("export",)
    """Not later: `build`, which reads what it makes, comes right behind `quantize`."""
    in_recipe: ClassVar[bool] = True

    does: str = "nothing"
    when: Literal["at once", "soon", "timed"] = "soon"
    """In the first call of the measuring process, after a few right answers, or only once it is timed."""

    @classmethod
    def configure(cls, recipe: Recipe, target: Target) -> tuple[Stage, ...]:
        options = recipe.stages.get(cls.name)
        return () if options is None else (cls.model_validate(dict(options)),)

    def label(self) -> str:
        return self.name

    def consumes(self) -> frozenset[str]:
        return frozenset({"onnx"})

    def produces(self) -> str:
        return "misdeed"

    def fingerprint(self, root: Path) -> Mapping[str, str]:
        return {}

    def run(self, inputs: Inputs, out: Path, site: Site) -> Meta:
        shutil.copytree(inputs["onnx"].path, out, dirs_exist_ok=True, copy_function=shutil.copyfile)
        (out / NOTE).write_text(self.model_dump_json(), encoding="utf-8")
        return {"does": self.does}


PLUGIN: type[Stage] = Misdeed
