"""Compile every precision of the recipes' models for TensorRT; print what was asked, what came of it, how near it is.

python benchmarks/tensorrt_forms.py recipes/minilm.yaml recipes/efficientnet_lite0.yaml
No GPU is needed, and nothing is timed but the compiler.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vbpipe import plugins
from vbpipe.core import Artifact, Site
from vbpipe.errors import VbpipeError
from vbpipe.recipe.load import load
from vbpipe.recipe.model import Recipe
from vbpipe.run.check import check
from vbpipe.runner import defining_runner
from vbpipe_stages.build import Build
from vbpipe_stages.fuse import Fuse
from vbpipe_stages.quantize import Quantize

FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("sm86", {"weight": "int8", "calibration": "minmax"}),
    ("sm86", {"weight": "int8", "activation": "float"}),
    ("sm86", {"weight": "int4", "activation": "float", "group_size": 64}),
    ("sm86", {"weight": "fp16"}),
    ("sm86", {"weight": "bf16"}),
    ("sm89", {"weight": "fp8"}),
)


def main() -> None:
    """Print a table for each recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", type=Path, nargs="+")
    for path in parser.parse_args().recipes:
        loaded = load(path)
        recipe = next(iter(loaded.variants.values()))
        print(f"\n{loaded.name}\n{'form':<42} {'arch':<5} {'modules: asked, missed, unseen':<32} MB    cosine   s")
        with TemporaryDirectory() as folder:
            made = _exported(recipe, loaded.root, Path(folder))
            for arch, form in FORMS:
                print(_line(made, loaded.root, Path(folder), arch, form), flush=True)


def _exported(recipe: Recipe, root: Path, folder: Path) -> dict[str, Artifact]:
    made: dict[str, Artifact] = {}
    target = next(iter(recipe.targets.values()))
    for name in ("samples", "eager", "export"):
        for step in plugins.stage(name).configure(recipe, target):
            if step.produces() != "torchscript":
                made[step.produces()] = _run(step, made, root, folder / step.label())
    return {**made, "onnx": _run(Fuse(contrib=False), made, root, folder / "fuse")}


def _line(made: dict[str, Artifact], root: Path, folder: Path, arch: str, form: dict[str, Any]) -> str:
    told = f"{', '.join(f'{key} {value}' for key, value in form.items()):<42} {arch:<5}"
    began = time.monotonic()
    try:
        step = Quantize.model_validate({"default": form, "dialect": "tensorrt", "device": arch})
        graph = _run(step, made, root, folder / f"{arch}-{len(list(folder.iterdir()))}")
        runner = defining_runner("onnx")
        assert runner is not None
        near = check("onnx", graph.path, runner, {k: made[k] for k in ("samples", "reference")}, root, None)
        engine = _run(Build(backend="tensorrt_rtx", arch=arch), {"onnx": graph}, root, graph.path / "engine")
    except VbpipeError as error:
        return f"{told} {error}"
    asked = Counter(form for form in graph.meta["modules"].values() if form != "float")
    counts = f"{sum(asked.values())}, {len(engine.meta['missed'])}, {len(engine.meta['not_inspected'])}"
    size, cosine = engine.meta["plan_bytes"] / 1e6, near["cosine"]
    return f"{told} {counts:<32} {size:<5.1f} {cosine:.4f}   {time.monotonic() - began:.0f}"


def _run(step: Any, made: dict[str, Artifact], root: Path, out: Path) -> Artifact:
    out.mkdir(parents=True)
    meta = step.run({kind: made[kind] for kind in step.consumes()}, out, Site(root, threads=2))
    return Artifact(step.produces(), step.label(), out, meta)


if __name__ == "__main__":
    main()
