"""A recipe with a target whose engines this host can build and not run, through the command line."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vbpipe_stages import _cuda

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt_rtx is not installed"),
    pytest.mark.skipif("sm89" in _cuda.architectures(), reason="this host has the GPU that the tests do without"),
]

RECIPES = Path(__file__).parents[2] / "recipes"
VARIANTS = """
variants:
  int8: {stages.quantize.default: {weight: int8}}
  fp8: {stages.quantize.default: {weight: fp8}}
targets:
  ada: {backend: tensorrt_rtx, arch: sm89}
"""
MISS = """
variants:
  int4: {stages.quantize.default: {weight: int4, activation: float, group_size: 16}}
targets:
  ada: {backend: tensorrt_rtx, arch: sm89}
"""


def vbpipe(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vbpipe.cli", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stdout + done.stderr
    return done


def recipe(folder: Path, variants: str, cosine: float) -> None:
    """Write tiny.yaml with other variants and targets, and one gate of its own."""
    shutil.copytree(RECIPES / "models", folder / "recipes/models")
    text = (RECIPES / "tiny.yaml").read_text()
    head, _, rest = text.partition("variants:")
    stages = "stages:" + rest.partition("stages:")[2].partition("gates:")[0]
    gates = f"gates:\n  - {{metric: cosine, min: {cosine}}}\n"
    (folder / "recipes/tiny.yaml").write_text(head + variants + stages + gates)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("pending")
    recipe(folder, VARIANTS, 0.9)
    return folder, vbpipe(folder, "build", "recipes/tiny.yaml")


@pytest.fixture
def report(built: tuple[Path, subprocess.CompletedProcess[str]]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((built[0] / "artifacts/tiny/report.json").read_text())
    return found


def test_the_build_ends_with_the_code_for_pending_and_says_what_it_takes(
    built: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, done = built
    assert done.returncode == 5, done.stdout + done.stderr
    assert "needs an SM89 GPU" in done.stdout
    assert "packaged: nothing yet" in done.stdout


def test_pending_can_be_allowed_and_nothing_is_built_again(
    built: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = built
    done = vbpipe(folder, "build", "recipes/tiny.yaml", "--allow-pending")
    assert done.returncode == 0, done.stdout
    assert " built " not in done.stderr


def test_no_row_has_a_time_and_every_row_says_why(report: dict[str, Any]) -> None:
    rows = report["targets"]["ada"]["verdict"]["rows"]
    assert {"int8/engine", "fp8/engine"} <= rows.keys()
    assert all(not row["ratios"] and not row["latency"] for row in rows.values())
    assert all(row["not_measured"] == "pending: needs an SM89 GPU." for row in rows.values())


def test_engines_are_scored_by_the_graphs_that_they_were_built_from(report: dict[str, Any]) -> None:
    rows = report["targets"]["ada"]["verdict"]["rows"]
    assert rows["int8/engine"]["scored"] == "int8/quantize"
    assert rows["int8/engine"]["metrics"]["cosine"] == rows["int8/quantize"]["metrics"]["cosine"]
    assert 0.9 < rows["fp8/engine"]["metrics"]["cosine"]["value"] < 1


def test_engines_compute_every_module_in_the_type_that_was_asked_for(
    built: tuple[Path, subprocess.CompletedProcess[str]], report: dict[str, Any]
) -> None:
    engines = [step["meta"] for step in report["steps"] if step["label"] == "engine"]
    assert [set(meta["achieved"].values()) for meta in engines] in ([{"int8"}, {"fp8"}], [{"fp8"}, {"int8"}])
    assert all(not meta["missed"] and not meta["not_inspected"] for meta in engines)
    shown = vbpipe(built[0], "report", "artifacts/tiny/report.json", "--format", "precision").stdout
    assert "static int8 in fp16: int8" in shown
    assert "static fp8 in fp16: fp8" in shown


def test_the_plan_says_what_only_another_host_can_do(built: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    done = vbpipe(built[0], "plan", "recipes/tiny.yaml")
    assert "to run and measure them needs an SM89 GPU" in done.stdout


def test_a_graph_that_is_too_far_from_eager_is_refused_before_any_gpu_has_seen_it(tmp_path: Path) -> None:
    recipe(tmp_path, MISS, 0.99999)
    done = vbpipe(tmp_path, "build", "recipes/tiny.yaml")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "int4/engine: cosine >= 0.99999" in done.stdout
