"""Stored reports that gates compare with: what is read of them, and what a recipe is told at once."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from vbpipe.errors import RecipeError, UsageError
from vbpipe.measure.statistics import t_quantile
from vbpipe.recipe.load import load
from vbpipe.recipe.model import Gate, StoredReport
from vbpipe.report.stored import differences, environment, lacking, read_ratio, stored_target

RECIPES = Path(__file__).parents[2] / "recipes"
S = "batch=1,seq=16"
HOST = {"processor": "P", "flags": "avx2", "cores": "2 of 2", "quota": "none", "kernel": "Linux 6.1"}
RATIO = {"value": 2.0, "low": 1.9, "high": 2.0 * 2.0 / 1.9, "groups": 8, "verdict": "faster"}
GATE = "  - {metric: speedup, over: {report: kept/last.json, row: int4/engine}, min: 0.97}\n"


def verdict() -> dict[str, Any]:
    def row(ratios: dict[str, Any], **metrics: float) -> dict[str, Any]:
        return {"ratios": ratios, "metrics": {name: {"value": value} for name, value in metrics.items()}}

    rows = {"eager": row({}, accuracy=0.9), "int4/engine": row({S: RATIO}, accuracy=0.8)}
    return {"host": HOST, "scenarios": [S], "noise_floor": {S: 0.01}, "rows": rows}


def report(**targets: Any) -> dict[str, Any]:
    facts = {name: {"threads": 1, "verdict": found} for name, found in targets.items()}
    return {"report": 1, "recipe": {"name": "tiny"}, "targets": facts}


def kept(folder: Path, body: object) -> Path:
    path = folder / "kept" / "last.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(body if isinstance(body, str) else json.dumps(body))
    return path


def test_a_target_is_read_as_gates_judge_it(tmp_path: Path) -> None:
    here = {**HOST, "threads": "1"}
    found = stored_target(kept(tmp_path, report(cpu=verdict())), "cpu", here)
    assert found.differs == ""
    assert found.noise == {S: 0.01}
    assert found.rows["int4/engine"].metrics["accuracy"].value == 0.8
    speedup = found.rows["int4/engine"].speedups[S]
    assert (speedup.value, speedup.low, speedup.high) == pytest.approx((2.0, 1.9, 2.0 * 2.0 / 1.9))


def test_an_interval_is_widened_to_the_level_that_is_asked_for() -> None:
    wider = t_quantile(0.9975, 7) / t_quantile(0.975, 7)
    found = read_ratio(RATIO, 0.995)
    wild = read_ratio({"value": 1.0, "low": 1e-8, "high": 1e8, "groups": 2}, 0.9999)
    assert (wild.low, wild.high) == (0.0, math.inf)
    assert found.low == pytest.approx(2.0 * (1.9 / 2.0) ** wider)
    assert found.high == pytest.approx(2.0 * (2.0 / 1.9) ** wider)


@pytest.mark.parametrize("change", [{"low": 0.0, "high": 1e9}, {"high": 1e9}, {"groups": 1}])
def test_a_ratio_of_one_group_has_no_interval(change: dict[str, float]) -> None:
    found = read_ratio({**RATIO, **change})
    assert (found.value, found.low, found.high) == (2.0, 0.0, math.inf)


def test_hosts_differ_in_what_changes_speed_and_not_in_their_kernel() -> None:
    here = environment(report(cpu=verdict()), "cpu")
    assert here["threads"] == "1"
    assert differences(here, {**here, "kernel": "Linux 9"}) == ()
    there = {**here, "processor": "Q", "flags": "", "cores": "8 of 8", "quota": "1.5", "threads": "4"}
    assert differences(here, there) == (
        "processor: P here, Q there", "flags: avx2 here, unknown there", "cores: 2 of 2 here, 8 of 8 there",
        "quota: none here, 1.5 there", "threads: 1 here, 4 there",
    )  # fmt: skip


def test_what_a_comparison_needs_and_the_report_lacks_is_named(tmp_path: Path) -> None:
    found = stored_target(kept(tmp_path, report(cpu=verdict())), "cpu", {})
    assert lacking(found, "int4/engine", [S]) == ""
    assert lacking(found, "eager", []) == ""
    assert lacking(found, "int5/engine", []) == "it has no step 'int5/engine'; it has eager, int4/engine."
    assert lacking(found, "int4/engine", ["x=1"]) == f"it has no speed-up of 'int4/engine' at x=1; it has {S}."
    assert "name another step" in lacking(found, "eager", [S])


BROKEN = [
    ("{", "it is no report."),
    (json.dumps({"report": 2, "targets": {}}), "it is no report of version 1."),
    ([], "it is no report of version 1."),
    (report(gpu=verdict()), "it has no target 'cpu'; it has gpu."),
    (report(cpu=None), "nothing was judged on target 'cpu' in it."),
    ({"report": 1}, "it is not laid out as a report"),
    (report(cpu={**verdict(), "rows": {"a": {"ratios": {S: {**RATIO, "value": -1}}, "metrics": {}}}}), "a ratio of -1"),
    (report(cpu={**verdict(), "rows": {"a": {"ratios": {S: {**RATIO, "low": None}}, "metrics": {}}}}), "laid out"),
    (report(cpu={**verdict(), "rows": [3]}), "it is not laid out as a report"),
]


@pytest.mark.parametrize(("body", "message"), BROKEN, ids=[str(i) for i in range(len(BROKEN))])
def test_a_file_that_is_no_report_of_the_target_is_refused(tmp_path: Path, body: object, message: str) -> None:
    path = kept(tmp_path, body)
    with pytest.raises(UsageError, match=message.replace("(", r"\(")) as caught:
        stored_target(path, "cpu", {})
    assert str(path) in str(caught.value)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """tiny.yaml with one more gate."""
    shutil.copytree(RECIPES / "models", tmp_path / "models")
    path = tmp_path / "r.yaml"
    path.write_text((RECIPES / "tiny.yaml").read_text() + GATE)
    return path


def problems(recipe: Path, *overrides: str) -> list[str]:
    try:
        load(recipe, overrides=overrides)
    except RecipeError as error:
        return [f"{p.path}: {p.message}" for p in error.problems]
    return []


def test_a_gate_over_a_stored_report_is_read(recipe: Path) -> None:
    kept(recipe.parent, report(cpu=verdict()))
    loaded = load(recipe).variants["standard"]
    assert loaded.gates[-1].over == StoredReport(report="kept/last.json", row="int4/engine")
    assert Gate.model_validate_json(loaded.gates[-1].model_dump_json()) == loaded.gates[-1]


def test_a_report_that_is_not_there_is_a_problem_of_the_recipe_before_anything_is_measured(recipe: Path) -> None:
    (recipe.parent / "kept").mkdir()
    (recipe.parent / "kept" / "lsat.json").touch()
    (found,) = problems(recipe)
    assert found == "gates[3].over.report: no file 'kept/last.json' beside the recipe. Did you mean 'kept/lsat.json'?"


def test_a_report_of_another_recipe_is_refused(recipe: Path) -> None:
    kept(recipe.parent, {**report(cpu=verdict()), "recipe": {"name": "other"}})
    (found,) = problems(recipe)
    assert "it is of recipe 'other', not of 'tiny'" in found


@pytest.mark.parametrize("name", ["../last.json", "/etc/hostname"])
def test_a_report_outside_the_recipes_folder_is_refused_there_or_not(recipe: Path, name: str) -> None:
    found = problems(recipe, f"gates.3.over.report={name}")
    assert len(found) == 1
    assert found[0].startswith(f"gates.3.over.report: '{name}' leads out of the recipe's folder.")


WRONG = [
    ("[]", (), "gates[3].over.report: 'kept/last.json' can't be compared with: it is no report of version 1."),
    (
        report(gpu=verdict()),
        (),
        "gates[3].over.report: 'kept/last.json' can't be compared with: it has no target 'cpu'",
    ),
    (report(cpu=verdict()), ("gates.3.over.row=int5/engine",), "has no step 'int5/engine'; it has eager, int4/engine."),
    (report(cpu=verdict()), ("gates.3.over.row=eager",), "name another step as its row."),
    (
        report(cpu=verdict()),
        ("stages.benchmark.scenarios=[{batch: 2}]",),
        "gates[3].over.row: 'kept/last.json': it has no speed-up of 'int4/engine' at batch=2,seq=16; it has",
    ),
    (
        report(cpu=verdict()),
        ("stages.benchmark.scenarios=[{batch: 2}]", "gates.3.over.row="),
        f"gates[3].over.report: 'kept/last.json' has no scenario 'batch=2,seq=16'; it has {S}.",
    ),
    (report(cpu=verdict()), ("gates.3.metric=accuracy",), "min and max of 'accuracy' are not over anything."),
    (report(cpu=verdict()), ("gates.3.over.reprot=x",), "no key 'reprot'. Did you mean 'report'?"),
]


@pytest.mark.parametrize(("body", "overrides", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_an_unfit_report_is_a_problem_of_the_recipe(
    recipe: Path, body: object, overrides: tuple[str, ...], message: str
) -> None:
    kept(recipe.parent, body)
    found = problems(recipe, *overrides)
    assert len(found) == 1, found
    assert message in found[0]


def test_only_the_scenario_that_a_gate_names_must_be_there(recipe: Path) -> None:
    kept(recipe.parent, report(cpu=verdict()))
    scenarios = "stages.benchmark.scenarios=[{batch: 2}, {batch: 1}]"
    assert problems(recipe, scenarios, "gates.3.scenario='batch=1'") == []
    assert len(problems(recipe, scenarios, "gates.3.scenario='batch=2'")) == 1


def test_a_target_that_the_report_lacks_is_left_to_the_gate_where_another_is_there(recipe: Path) -> None:
    kept(recipe.parent, report(cpu=verdict()))
    assert problems(recipe, "targets.other={backend: onnxruntime, threads: 1}") == []
