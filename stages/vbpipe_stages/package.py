"""Put the row that the gate chose into a bundle: engine, manifest, golden samples."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Literal

from vbpipe import samples
from vbpipe.core import Inputs, Meta, Site, Spec, Stage
from vbpipe.plan import Layout
from vbpipe.recipe.model import Recipe, Target
from vbpipe.runner import Runner, open_runner
from vbpipe.runtime.bundle import MANIFEST, Claim, FileFacts, Golden, Manifest, digest

ENGINE = "1"
"""Serving systems read numbered version folders; a bundle starts at 1."""


class Package(Spec):
    """Nothing is packaged when the gate chose eager: there is no engine to ship, and the meta says so."""

    name: ClassVar[str] = "package"
    version: ClassVar[int] = 1
    scope: ClassVar[Literal["chain", "each", "target"]] = "target"
    after: ClassVar[tuple[str, ...]] = ("gate",)

    recipe_name: str
    target: str = ""
    runners: Mapping[str, Runner] = {}

    @classmethod
    def configure(cls, recipe: Recipe, target: Target) -> tuple[Stage, ...]:
        return (cls(recipe_name=recipe.name),)

    def for_target(self, layout: Layout) -> Stage:
        return self.model_copy(update={"target": layout.target, "runners": dict(layout.runners)})

    def label(self) -> str:
        return self.name

    def consumes(self) -> frozenset[str]:
        return frozenset({"verdict", "samples", "engine", "onnx", "torchscript"})

    def produces(self) -> str:
        return "bundle"

    def fingerprint(self, root: Path) -> Mapping[str, str]:
        return _tools()

    def run(self, inputs: Inputs, out: Path, site: Site) -> Meta:
        verdict = json.loads((inputs["verdict"].path / "verdict.json").read_text(encoding="utf-8"))
        shipped = verdict["shipped"]
        if shipped is None:
            (out / "NOTHING_SHIPPED").write_text(verdict["why_nothing"] + "\n", encoding="utf-8")
            return {"shipped": None, "why": verdict["why_nothing"]}
        row, variant = shipped["row"], shipped["variant"]
        engine = inputs[row]
        shutil.copytree(engine.path, out / ENGINE, copy_function=shutil.copyfile)
        golden = self._write_golden(inputs, row, out)
        facts = verdict["rows"][row]
        manifest = Manifest(
            manifest=1,
            name=self.recipe_name,
            variant=variant,
            target=self.target,
            row=row,
            kind=engine.kind,
            runner=self.runners[row],
            engine=ENGINE,
            golden=golden,
            claim=Claim(
                ratios={s: {k: r[k] for k in ("value", "low", "high")} for s, r in facts["ratios"].items()},
                metrics={name: figure["value"] for name, figure in facts["metrics"].items()},
                verdict=facts["verdict"],
                host=verdict["host"],
            ),
            tools=_tools(),
            files=_files(out),
        )
        text = json.dumps(manifest.model_dump(mode="json"), indent=1, sort_keys=True)
        (out / MANIFEST).write_text(text + "\n", encoding="utf-8")
        return {"shipped": row, "variant": variant, "files": len(manifest.files)}

    def _write_golden(self, inputs: Inputs, row: str, out: Path) -> Golden:
        """Record what this engine answers: a copy that answers the same is the one that was measured."""
        asked = samples.load(inputs["samples"].path / "check.safetensors")
        with open_runner(self.runners[row], inputs[row].kind, inputs[row].path) as run:
            answers = [run(sample) for sample in asked]
        (out / "golden").mkdir()
        golden = Golden(inputs="golden/inputs.safetensors", outputs="golden/outputs.safetensors")
        samples.save(out / golden.inputs, asked)
        samples.save(out / golden.outputs, answers)
        return golden


def _files(out: Path) -> dict[str, FileFacts]:
    found = sorted(path for path in out.rglob("*") if path.is_file())
    return {p.relative_to(out).as_posix(): FileFacts(sha256=digest(p), size=p.stat().st_size) for p in found}


def _tools() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("numpy", "onnx", "onnxruntime", "onnxscript", "torch", "vbpipe"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


PLUGIN: type[Stage] = Package
