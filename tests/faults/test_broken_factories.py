"""Models and data that can't be built, each a variant of one recipe: one clear error each, and the good one goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

NET = """
import numpy as np
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, size=4):
        super().__init__()
        self.first = nn.Linear(size, 8)
        self.drop = nn.Dropout(0.5)
    def forward(self, x):
        return self.drop(self.first(x))

class Windowed(Net):
    def forward(self, x):
        return super().forward(x.unfold(0, 2, 1).mean(-1))

class Nans(Net):
    def forward(self, x):
        return super().forward(x) * float("nan")

class Two(Net):
    def forward(self, x):
        y = super().forward(x)
        return y, y

class Needs(Net):
    def forward(self, x, mask):
        return super().forward(x)

class Raises(Net):
    def forward(self, x):
        raise RuntimeError("no such thing")

class Text(Net):
    def forward(self, x):
        return "a text"

class Baked(Net):
    def forward(self, x):
        rows = int(x.shape[0])
        steps = [x[i] for i in range(rows)]          # the trace keeps this many
        return super().forward(torch.stack(steps))

def good(): return Net().eval()
def training(): return Net().train()
def raises(): raise ValueError("the weights are gone")
def none(): return None
def not_module(): return 3
def wrong_size(): return Net(5).eval()
def windowed(): return Windowed().eval()
def nans(): return Nans().eval()
def two(): return Two().eval()
def needs(): return Needs().eval()
def forward_raises(): return Raises().eval()
def text(): return Text().eval()
def nan_weights():
    net = Net().eval()
    with torch.no_grad():
        net.first.weight[0, 0] = float("nan")
    return net
def needs_argument(size): return Net(size).eval()
def exits(): raise SystemExit(5)
def missing_import():
    import no_such_package_anywhere
def baked(): return Baked().eval()

def rows(n=4, **changes):
    for i in range(n):
        yield {"x": np.full((2, 4), i, dtype="float32")}
def data_good(): return rows()
def data_empty(): return []
def data_raises():
    yield from rows(1)
    raise OSError("the disk is gone")
def data_dtype(): return [{"x": np.zeros((2, 4), dtype="float64")}]
def data_shape(): return [{"x": np.zeros((2, 5), dtype="float32")}]
def data_name(): return [{"y": np.zeros((2, 4), dtype="float32")}]
def data_nan(): return [{"x": np.full((2, 4), np.nan, dtype="float32")}]
def data_list(): return [[1, 2, 3]]
def data_too_large(): return [{"x": np.zeros((9, 4), dtype="float32")}]
def data_number(): return 7
"""

RECIPE = """
recipe: 1
name: faults
model:
  factory: net.py:good
  inputs: {{x: {{dtype: float32, shape: [batch, 4]}}}}
  outputs: [y]
  shapes: {{batch: {{min: 1, opt: 2, max: 8}}}}
data: {{calibration: net.py:data_good}}
variants:
  standard: {{}}
{variants}
targets:
  cpu: {{backend: onnxruntime}}
stages:
  export: {{formats: [onnx]}}
  benchmark: {{budget_s: 90, min_groups: 2, max_groups: 2}}
gates:
  - {{metric: cosine, min: 0.99}}
  - {{metric: speedup, min: 0.001}}
"""

# (variant's change, the step that fails, a piece of what is said)
TABLE: Mapping[str, tuple[str, str, str]] = {
    "raises": ("model.factory: net.py:raises", "eager", "the weights are gone"),
    "none": ("model.factory: net.py:none", "eager", "nn.Module"),
    "not_module": ("model.factory: net.py:not_module", "eager", "nn.Module"),
    "wrong_size": ("model.factory: net.py:wrong_size", "eager", "mat1 and mat2"),
    "windowed": ("model.factory: net.py:windowed", "eager", "shapes.batch.min"),
    "nans": ("model.factory: net.py:nans", "eager", "NaN"),
    "two": ("model.factory: net.py:two", "eager", "2"),
    "needs": ("model.factory: net.py:needs", "eager", "mask"),
    "forward_raises": ("model.factory: net.py:forward_raises", "eager", "no such thing"),
    "text": ("model.factory: net.py:text", "eager", "str"),
    "nan_weights": ("model.factory: net.py:nan_weights", "eager", "first.weight"),
    "needs_argument": ("model.factory: net.py:needs_argument", "eager", "size"),
    "exits": ("model.factory: net.py:exits", "eager", "SystemExit"),
    "missing_import": ("model.factory: net.py:missing_import", "eager", "no_such_package_anywhere"),
    "data_empty": ("data.calibration: net.py:data_empty", "samples", "data_empty"),
    "data_raises": ("data.calibration: net.py:data_raises", "samples", "the disk is gone"),
    "data_dtype": ("data.calibration: net.py:data_dtype", "samples", "float64"),
    "data_shape": ("data.calibration: net.py:data_shape", "samples", "[2, 5]"),
    "data_name": ("data.calibration: net.py:data_name", "samples", "['y']"),
    "data_nan": ("data.calibration: net.py:data_nan", "samples", "NaN"),
    "data_list": ("data.calibration: net.py:data_list", "samples", "list"),
    "data_too_large": ("data.calibration: net.py:data_too_large", "samples", "profile"),
    "data_number": ("data.calibration: net.py:data_number", "samples", "int"),
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "net.py").write_text(NET)
    variants = "\n".join(f"  {name}: {{{change}}}" for name, (change, _, _) in TABLE.items())
    variants += "\n  training: {model.factory: net.py:training}\n  baked: {model.factory: net.py:baked}"
    (folder / "faults.yaml").write_text(RECIPE.format(variants=variants))
    command = [sys.executable, "-m", "vbpipe.cli", "build", "faults.yaml", "--jobs", "2"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "artifacts/faults/report.json").read_text())
    assert done.returncode == found["exit_code"] == 3
    return {**found, "said": done.stderr}


def steps_of(report: Mapping[str, Any], variant: str) -> dict[str, Mapping[str, Any]]:
    mine = [s for s in report["steps"] if any(i.startswith(f"faults/{variant}/") for i in s["identities"])]
    return {step["label"]: step for step in mine}


@pytest.mark.parametrize("variant", TABLE)
def test_a_broken_factory_or_generator_fails_its_own_step_with_one_clear_paragraph(
    report: Mapping[str, Any], variant: str
) -> None:
    _, label, piece = TABLE[variant]
    step = steps_of(report, variant)[label]
    assert step["status"] == "failed", step
    assert piece in step["error"], step["error"]
    assert len(step["error"]) < 900
    assert Path(step["failure"], "log.txt").exists()
    verdict = report["targets"]["cpu"]["verdict"]["variants"][variant]
    assert verdict["outcome"] == "fail"


def test_the_variant_that_is_in_order_is_built_and_packaged(report: Mapping[str, Any]) -> None:
    steps = steps_of(report, "standard")
    assert steps["engine"]["status"] == "built"
    assert report["targets"]["cpu"]["verdict"]["shipped"]["row"].endswith("engine")


def test_a_model_in_train_mode_is_put_into_eval_mode_and_that_is_said(report: Mapping[str, Any]) -> None:
    step = steps_of(report, "training")["eager"]
    assert step["status"] == "built"
    assert step["meta"]["train_mode_fixed"] is True


def test_a_loop_over_the_batch_that_an_exporter_unrolls_is_caught_at_another_size(report: Mapping[str, Any]) -> None:
    step = steps_of(report, "baked")["export.onnx"]
    assert step["status"] == "failed"
    assert "batch" in step["error"] or "[" in step["error"]
