"""Plans of real recipes: who shares what, what is compared with what."""

from __future__ import annotations

from pathlib import Path

import pytest

from vbpipe.errors import UsageError
from vbpipe.plan import Plan, make_plan, stage_order
from vbpipe.recipe.load import load

NET = "def build(size=4): ...\ndef other(): ...\ndef rows(): return []\n"
RECIPE = """
recipe: 1
name: net
model:
  factory: net.py:build
  inputs: {{x: {{dtype: float32, shape: [batch, 4]}}}}
  outputs: [y]
  shapes: {{batch: {{min: 1, opt: 2, max: 8}}}}
variants:
  standard: {{}}
{variants}
targets:
{targets}
stages:
  fuse: {{level: all}}
"""
CPU = "  cpu: {backend: onnxruntime}"
INT8 = "  int8: {stages.quantize.default: {weight: int8, calibration: dynamic}}"


def plan_of(folder: Path, variants: str = INT8, targets: str = CPU) -> Plan:
    (folder / "net.py").write_text(NET)
    (folder / "r.yaml").write_text(RECIPE.format(variants=variants, targets=targets))
    loaded = load(folder / "r.yaml")
    return make_plan(loaded.name, loaded.variants)


def test_stages_are_ordered_by_what_they_come_after() -> None:
    order = stage_order()
    assert order.index("samples") < order.index("eager") < order.index("export") < order.index("fuse")
    assert order.index("quantize") < order.index("build") < order.index("benchmark") < order.index("gate")


def test_variants_share_the_steps_that_are_the_same_for_both(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    labels = [step.label for step in plan.steps.values()]
    assert labels.count("export.onnx") == 1
    assert labels.count("engine") == 2
    assert {"eager", "export.onnx", "int8/quantize", "int8/engine"} <= plan.rows["cpu"].keys()


def test_each_row_is_compared_with_the_step_that_it_was_made_from(tmp_path: Path) -> None:
    plan = plan_of(
        tmp_path, variants="  torchscript_x: {stages.quantize.default: {weight: int8, calibration: dynamic}}"
    )
    gate = plan.steps[plan.finals["cpu"]["gate"]].stage
    assert gate.previous == {
        "export.torchscript": "eager",
        "export.onnx": "eager",
        "standard/fuse": "export.onnx",
        "standard/engine": "standard/fuse",
        "torchscript_x/fuse": "export.onnx",
        "torchscript_x/quantize": "torchscript_x/fuse",
        "torchscript_x/engine": "torchscript_x/quantize",
    }


def test_a_variant_with_its_own_model_is_measured_over_the_references_eager(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, variants="  flash: {model.factory: net.py:other}")
    rows = plan.rows["cpu"]
    reference = next(chain.steps for chain in plan.chains if chain.variant == "standard")
    assert rows["eager"] in reference
    assert rows["flash/eager"] not in reference
    benchmark = plan.steps[plan.finals["cpu"]["benchmark"]].stage
    assert benchmark.chains["flash"][0] == "flash/eager"


def test_what_targets_share_is_checked_the_same_whichever_asks_first(tmp_path: Path) -> None:
    gpu = "  gpu: {backend: onnxruntime, providers: [cuda]}"
    for targets in (f"{CPU}\n{gpu}", f"{gpu}\n{CPU}"):
        plan = plan_of(tmp_path, targets=targets)
        shared = next(step for step in plan.steps.values() if step.label == "export.onnx")
        assert shared.runner is not None
        assert shared.runner.options == {"as_defined": True}
        benchmark = plan.steps[plan.finals["gpu"]["benchmark"]].stage
        assert benchmark.runners["export.onnx"].options != {}


def test_quantizing_for_a_target_that_builds_from_torchscript_is_an_error_and_no_silent_no_op(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="builds from torchscript"):
        plan_of(tmp_path, targets="  ts: {backend: torchscript}")


def test_a_missing_format_names_what_lacks(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="reads 'onnx', which no step before it makes"):
        plan_of(tmp_path, variants="  ts: {stages.export: {formats: [torchscript]}}")
