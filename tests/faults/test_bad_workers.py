"""Engines that are in order until they are measured, each a variant of one recipe: a clear outcome each, no times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

PLUGIN_FOLDER = Path(__file__).parents[1] / "plugin"
MEMORY_MIB = 4096
"""Address space, of which a good worker takes a small part."""

NET = """
import numpy as np
import torch

def build():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).eval()

def data():
    for seed in range(4):
        yield {"x": np.random.default_rng(seed).normal(size=(4, 64)).astype("float32")}
"""

RECIPE = f"""
recipe: 1
name: bad
model:
  factory: net.py:build
  inputs: {{x: {{dtype: float32, shape: [batch, 64]}}}}
  outputs: [y]
  shapes: {{batch: {{min: 1, opt: 4, max: 8}}}}
data: {{calibration: net.py:data}}
variants:
  standard: {{}}
  prints: {{stages.misdeed: {{does: print}}}}
%s
targets:
  cpu: {{backend: misbehaving}}
stages:
  export: {{formats: [onnx], exporter: torchscript}}
  misdeed: {{does: nothing}}
  benchmark: {{budget_s: 40, min_groups: 2, max_groups: 2, call_timeout_s: 3, memory_limit_mib: {MEMORY_MIB}}}
gates:
  - {{metric: speedup, min: 0.001}}
"""

PIPE = "failed: it wrote into the pipe that is for messages only"
ALLOWED = f"allowed {MEMORY_MIB} MiB"

# (what the variant's engine does in the measuring process, when, pieces of its outcome)
BAD: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "segfault": ("segfault", "at once", ("crashed: its process was ended by SIGSEGV.",)),
    "exit": ("exit", "timed", ("crashed: its process ended with exit code 0 and no result.",)),
    "killed": ("killed", "soon", ("crashed: its process was ended by SIGKILL. The machine may be out of memory.",)),
    "hang": ("hang", "timed", ("hung: no answer for ",)),
    "garbage": ("garbage", "timed", (PIPE,)),
    "forge": ("forge", "soon", (PIPE,)),
    "forge_empty": ("forge_empty", "soon", (PIPE,)),
    "chatter": ("chatter", "timed", (PIPE,)),
    "flood": ("flood", "soon", (PIPE,)),
    "leak": ("leak", "soon", ("failed: ", "MemoryError", f"It ran out of memory: it was {ALLOWED}.")),
    "native_leak": ("native_leak", "soon", ("crashed: its process was ended by SIGSEGV.", f"It was {ALLOWED}")),
    "nan": ("nan", "soon", ("wrong: ", "after timing: output 'y' is not finite")),
    "shape": ("shape", "soon", ("wrong: ", "after timing: output 'y' has shape [1, 8], expected [4, 8]")),
    "zeros": ("zeros", "soon", ("wrong: ", "after timing: output 'y' has cosine 0.000000")),
}


@dataclass(frozen=True)
class Built:
    """What a build left: its exit code, what it printed, its report."""

    code: int
    out: str
    err: str
    report: Mapping[str, Any]

    @property
    def verdict(self) -> Mapping[str, Any]:
        """Return the verdict on the one target."""
        found: Mapping[str, Any] = self.report["targets"]["cpu"]["verdict"]
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "net.py").write_text(NET)
    variants = "\n".join(
        f"  {name}: {{stages.misdeed: {{does: {does}, when: {when}}}}}" for name, (does, when, _) in BAD.items()
    )
    (folder / "bad.yaml").write_text(RECIPE % variants)
    return folder


@pytest.fixture(scope="module")
def built(folder: Path) -> Built:
    return build(folder)


def build(folder: Path, *arguments: str) -> Built:
    path = os.pathsep.join(filter(None, [str(PLUGIN_FOLDER), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "vbpipe.cli", "build", "bad.yaml", "--jobs", "2", *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stdout + done.stderr
    report = json.loads((folder / "artifacts/bad/report.json").read_text())
    return Built(done.returncode, done.stdout, done.stderr, report)


@pytest.mark.parametrize("variant", BAD)
def test_a_bad_worker_is_named_with_what_it_did_and_has_no_times(built: Built, variant: str) -> None:
    _, _, pieces = BAD[variant]
    row = built.verdict["rows"][f"{variant}/engine"]
    assert [piece for piece in pieces if piece not in row["not_measured"]] == [], row["not_measured"]
    assert len(row["not_measured"]) < 400
    assert row["latency"] == row["ratios"] == row["over_previous"] == {}
    assert not [name for name in row["metrics"] if "@" in name or name.endswith("_s")]
    assert row["verdict"] == "not measured"


@pytest.mark.parametrize("variant", BAD)
def test_a_variant_whose_row_was_not_measured_is_refused_and_falls_back(built: Built, variant: str) -> None:
    verdict = built.verdict["variants"][variant]
    assert verdict["outcome"] == "fail"
    assert verdict["chosen"] != f"{variant}/engine"
    assert verdict["reasons"]


def test_the_rows_beside_bad_ones_are_measured_and_judged_and_one_is_packaged(built: Built, folder: Path) -> None:
    for name in ("export.onnx", "standard/engine", "prints/engine"):
        row = built.verdict["rows"][name]
        assert row["not_measured"] == ""
        assert all(ratio["groups"] == 2 for ratio in row["ratios"].values()), row["ratios"]
        assert row["outcome"] == "pass"
    assert built.verdict["rows"]["eager"]["latency"]
    assert {built.verdict["variants"][name]["outcome"] for name in ("standard", "prints")} == {"pass"}
    bad = {f"{name}/engine" for name in BAD}
    assert built.verdict["shipped"]["row"] not in bad
    assert (folder / "artifacts/bad/cpu/bundle/vbpipe.manifest.json").exists()


def test_no_step_fails_for_a_bad_worker_and_the_exit_code_is_that_of_a_refusal(built: Built) -> None:
    assert {step["status"] for step in built.report["steps"]} == {"built"}
    assert built.code == built.report["exit_code"] == 1


def test_the_terminal_says_of_every_bad_worker_what_it_did(built: Built) -> None:
    for variant, (_, _, pieces) in BAD.items():
        lines = [line for line in built.out.splitlines() if f"{variant}/engine" in line]
        assert any(all(piece.split(": ")[-1] in line for piece in pieces) for line in lines), (variant, lines)


def test_a_worker_that_prints_garbage_is_measured_and_the_build_ends_well(built: Built, folder: Path) -> None:
    assert built.code == 1
    again = build(folder, "--variant", "prints", "--set", "stages.benchmark.budget_s=20")
    assert again.code == again.report["exit_code"] == 0, again.out + again.err
    row = again.verdict["rows"]["prints/engine"]
    assert row["not_measured"] == ""
    assert all(latency["samples"] > 0 for latency in row["latency"].values())
