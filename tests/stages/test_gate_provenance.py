"""What a benchmark writes beside its raw times: what they are of."""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from vbpipe import measure
from vbpipe.core import Artifact, Site
from vbpipe.recipe.model import Recipe
from vbpipe.runner import Runner
from vbpipe_stages import benchmark
from vbpipe_stages.benchmark import LIBRARIES, SUBJECTS, WORK, Benchmark

RECIPE = {
    "recipe": 1, "name": "little", "targets": {"cpu": {"backend": "onnxruntime"}},
    "model": {"factory": "models/net.py:build", "inputs": {"x": {"dtype": "float32", "shape": [2]}}, "outputs": ["y"]},
}  # fmt: skip


class NothingMeasured:
    groups = problems = outcomes = ()

    def save(self, folder: Path) -> None:
        (folder / "measurement.json.gz").touch()


def test_the_raw_times_have_their_subjects_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Benchmark, "_answers", lambda *_: {"fixed": tmp_path})
    monkeypatch.setattr(Benchmark, "_count_work", lambda *_: {})
    monkeypatch.setattr(measure, "measure", lambda *_, **__: NothingMeasured())
    recipe = Recipe.model_validate(RECIPE)
    (configured,) = Benchmark.configure(recipe, recipe.targets["cpu"])
    assert isinstance(configured, Benchmark)
    runners = {"eager": Runner(backend="eager"), "a/engine": Runner(backend="onnxruntime", options={"level": "all"})}
    stage = configured.model_copy(update={"runners": runners, "chains": {"a": ("eager", "a/engine")}})
    inputs = {
        "eager": Artifact("reference", "e" * 64, tmp_path, {}),
        "a/engine": Artifact("engine", "f" * 64, tmp_path, {}),
    }
    stage.run(inputs, tmp_path, Site(tmp_path))
    found: dict[str, Any] = json.loads((tmp_path / SUBJECTS).read_text())
    assert found["recipe"] == "little"
    assert found["model"] == {"factory": "models/net.py:build", "reference": "e" * 64}
    assert found["rows"] == {
        "eager": {"kind": "reference", "digest": "e" * 64, "backend": "eager", "options": {}},
        "a/engine": {"kind": "engine", "digest": "f" * 64, "backend": "onnxruntime", "options": {"level": "all"}},
    }
    assert found["seed"] == 20
    assert found["libraries"]["numpy"] == metadata.version("numpy")
    assert set(found["libraries"]) <= set(LIBRARIES)
    assert (tmp_path / WORK).exists()


def test_a_gpu_is_pending_where_a_driver_or_its_tool_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Path("/proc/driver/nvidia")
    exists = Path.exists
    for has_driver, tool, text in ((False, None, "none seen"), (True, None, "pending"), (False, "/x", "pending")):
        monkeypatch.setattr(Path, "exists", lambda path, has=has_driver: has if path == driver else exists(path))
        monkeypatch.setattr(shutil, "which", lambda _, tool=tool: tool)
        assert benchmark.gpu_facts().startswith(text)
