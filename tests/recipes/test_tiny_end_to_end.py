"""recipes/tiny.yaml through the command line, as a user would: build, again, change, break, run, report."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "recipes"
QUICK = ["--set", "stages.benchmark.budget_s=90", "--set", "stages.benchmark.min_groups=3"]
QUICK += ["--set", "stages.benchmark.max_groups=3", "--set", "gates.0.min=0.01"]
QUICK += ["--variant", "standard", "--variant", "int8_dynamic"]


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str
    cpu_s: float


def vbpipe(folder: Path, *arguments: str) -> Done:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "vbpipe.cli", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert "Traceback" not in done.stdout + done.stderr
    return Done(done.returncode, done.stdout, done.stderr, cpu_s)


def build(folder: Path, *arguments: str) -> Done:
    return vbpipe(folder, "build", "recipes/tiny.yaml", *QUICK, *arguments)


def report_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "artifacts/tiny/report.json").read_text())
    return found


def statuses(report: Mapping[str, Any]) -> dict[str, str]:
    return {step["identities"][0]: step["status"] for step in report["steps"]}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    shutil.copytree(RECIPES, folder / "recipes")
    done = build(folder)
    assert done.code == 0, done.out + done.err
    return folder


@pytest.fixture
def built(first: Path, tmp_path: Path) -> Path:
    """A copy of the first build that a test may do with as it likes."""
    shutil.copytree(first, tmp_path / "copy")
    return tmp_path / "copy"


def test_the_table_has_a_row_for_every_step_and_variant(first: Path) -> None:
    verdict = report_of(first)["targets"]["cpu"]["verdict"]
    assert {"eager", "export.torchscript", "export.onnx"} <= verdict["rows"].keys()
    assert {"int8_dynamic/quantize", "int8_dynamic/engine", "standard/engine"} <= verdict["rows"].keys()
    for name, row in verdict["rows"].items():
        assert name == "eager" or all(r["low"] <= r["value"] <= r["high"] for r in row["ratios"].values())


def test_the_same_command_again_runs_nothing(built: Path) -> None:
    done = build(built)
    assert done.code == 0
    assert set(statuses(report_of(built)).values()) == {"hit"}
    assert "built" not in done.err


def test_a_changed_rule_runs_quantize_and_what_follows_and_why_names_it(built: Path) -> None:
    default = "{weight: int8, calibration: dynamic, reduce_range: true}"
    rule = f"variants.int8_dynamic={{stages.quantize: {{default: {default}}}}}"
    planned = json.loads(vbpipe(built, "plan", "recipes/tiny.yaml", *QUICK, "--set", rule, "--json").out)
    quantize = next(s for s in planned["steps"] if s["step"] == "quantize")
    assert quantize["state"] == "miss"
    assert "options.default.reduce_range" in quantize["why"]
    assert build(built, "--set", rule).code in (0, 1, 4)
    ran = {name for name, status in statuses(report_of(built)).items() if status == "built"}
    assert "tiny/int8_dynamic/cpu/quantize" in ran
    assert not [name for name in ran if "export" in name or "/standard/" in name]
    why = vbpipe(built, "store", "why", "tiny/int8_dynamic/cpu/quantize").out
    assert "changed: options.default.reduce_range" in why


def test_the_bundle_answers_as_it_was_packaged(first: Path) -> None:
    done = vbpipe(first, "run", "artifacts/tiny/cpu/bundle", "--json")
    assert done.code == 0
    golden = json.loads(done.out)["golden"]
    assert golden["equal"] is True
    assert golden["samples"] >= 3


def test_the_bundle_runs_where_nothing_that_builds_is_installed(first: Path) -> None:
    absent = ["torch", "onnx", "onnx_ir", "onnxscript", "sympy", "transformers", "ml_dtypes"]
    code = f"import sys; sys.modules.update(dict.fromkeys({absent!r})); from vbpipe.cli import run; "
    code += "sys.exit(run(['run', 'artifacts/tiny/cpu/bundle']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=first, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "equal to the packaged outputs" in done.stdout


def test_users_inputs_are_run_and_wrong_ones_refused(built: Path) -> None:
    import numpy as np

    np.savez(built / "in.npz", x=np.ones((2, 5, 16), "float32"))
    np.savez(built / "bad.npz", x=np.ones((2, 5, 17), "float32"))
    done = vbpipe(built, "run", "artifacts/tiny/cpu/bundle", "--inputs", "in.npz", "--outputs", "out.npz")
    assert done.code == 0
    with np.load(built / "out.npz") as file:
        assert file["logits"].shape[0] == 2
    done = vbpipe(built, "run", "artifacts/tiny/cpu/bundle", "--inputs", "bad.npz")
    assert done.code == 2
    assert "axis 2 is 17, not 16" in done.err


def test_any_changed_file_of_a_bundle_is_noticed(built: Path) -> None:
    bundle = built / "artifacts/tiny/cpu/bundle"
    for path in sorted(p for p in bundle.rglob("*") if p.is_file()):
        good = path.read_bytes()
        for place in (0, len(good) // 2, len(good) - 1):
            path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
            done = vbpipe(built, "run", str(bundle)) if path.suffix != ".json" or place else None
            harmless = done is not None and path.name == "vbpipe.manifest.json" and "equal to" in done.out
            assert done is None or done.code != 0 or harmless
        path.write_bytes(good)
    (bundle / "extra.txt").write_text("x")
    assert "does not list" in vbpipe(built, "run", str(bundle)).err


def test_a_flipped_byte_in_the_store_is_noticed_and_made_again(built: Path) -> None:
    objects = built / "artifacts/store/v1/objects"
    victim = next(p for p in objects.rglob("model.onnx"))
    victim.chmod(0o644)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    assert vbpipe(built, "store", "verify").code == 3
    done = build(built)
    assert done.code == 0
    assert "warning" in done.err
    assert "built" in statuses(report_of(built)).values()
    assert vbpipe(built, "store", "verify").code == 0


def test_a_killed_build_goes_on_and_ends_with_the_same_digests(first: Path, tmp_path: Path) -> None:
    shutil.copytree(RECIPES, tmp_path / "recipes")
    for wait in (1.0, 3.0, 5.0):
        command = [sys.executable, "-m", "vbpipe.cli", "build", "recipes/tiny.yaml", *QUICK]
        child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(wait)
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert vbpipe(tmp_path, "store", "verify").code == 0
    assert build(tmp_path).code == 0
    measured = {"measurement", "verdict", "bundle"}
    want = {s["identities"][0]: s["digest"] for s in report_of(first)["steps"] if s["kind"] not in measured}
    got = {s["identities"][0]: s["digest"] for s in report_of(tmp_path)["steps"] if s["kind"] not in measured}
    assert got == want


def test_sigterm_ends_a_build_with_130_and_says_how_to_go_on(tmp_path: Path) -> None:
    shutil.copytree(RECIPES, tmp_path / "recipes")
    command = [sys.executable, "-m", "vbpipe.cli", "build", "recipes/tiny.yaml", *QUICK]
    child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(3)
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=20)
    assert child.returncode == 130
    assert "the same command goes on from there" in said


def test_a_report_is_printed_in_every_form(first: Path) -> None:
    path = "artifacts/tiny/report.json"
    markdown = vbpipe(first, "report", path, "--format", "markdown").out
    assert "| step |" in markdown
    junit = ET.fromstring(vbpipe(first, "report", path, "--format", "junit").out)
    assert junit.find("testsuite[@name='cpu']/testcase") is not None
    assert json.loads(vbpipe(first, "report", path, "--format", "json").out) == report_of(first)
    assert "standard/engine" in vbpipe(first, "report", path).out


def test_a_variant_that_is_slower_is_refused_and_not_packaged(built: Path) -> None:
    done = build(built, "--set", "gates.0.min=1000")
    assert done.code == 1
    report = report_of(built)
    assert report["targets"]["cpu"]["bundle_path"] is None
    assert "speedup over eager >= 1000" in done.out
    assert not (built / "artifacts/tiny/cpu/bundle").exists()


def test_bench_measures_again_and_compares_bundles(built: Path) -> None:
    again = vbpipe(built, "bench", "recipes/tiny.yaml", *QUICK, "--json")
    assert again.code in (0, 4)
    found = json.loads(again.out)
    ran = [s["label"] for s in found["steps"] if s["status"] == "built"]
    assert ran == ["benchmark", "gate"]
    shutil.copytree(built / "artifacts/tiny/cpu/bundle", built / "other")
    done = vbpipe(built, "bench", "artifacts/tiny/cpu/bundle", "other", "--budget", "10")
    assert done.code == 0
    assert "baseline" in done.out


def test_a_module_is_found_in_every_step_through_fusion_quantization_and_engine(first: Path) -> None:
    done = vbpipe(first, "where", "recipes/tiny.yaml", "attention.query", *QUICK, "--json")
    found = json.loads(done.out)
    assert {step.split(" ")[0] for step in found} == {"export.onnx", "fuse", "quantize", "engine"}
    assert all(found.values()), {step: nodes for step, nodes in found.items() if not nodes}
    quantized = next(nodes for step, nodes in found.items() if step.startswith("quantize"))
    assert "MatMulInteger" in {node["operator"] for node in quantized}
    assert all("attention.query" in node["modules"] for nodes in found.values() for node in nodes)
    missing = vbpipe(first, "where", "recipes/tiny.yaml", "attention.qeury", *QUICK)
    assert missing.code == 2
    assert "Did you mean 'attention.query'?" in missing.err


def test_the_rule_of_each_module_is_told_before_anything_runs(tmp_path: Path) -> None:
    shutil.copytree(RECIPES, tmp_path / "recipes")
    rules = "stages.quantize.rules=[{regex: 'attention\\..*', keep: true}]"
    done = vbpipe(
        tmp_path, "plan", "recipes/tiny.yaml", "--variant", "int8_dynamic", "--layers", "--json", "--set", rules
    )
    (choices,) = json.loads(done.out).values()
    gets = {choice["module"]: choice["gets"] for choice in choices}
    assert gets["attention.query"] == "float"
    assert gets["ffn.0"] == "dynamic int8"
    assert not (tmp_path / "artifacts").exists()


@pytest.mark.parametrize("arguments", [["store", "ls"], ["store", "gc", "--dry-run"], ["doctor"]])
def test_commands_that_report_also_speak_json(first: Path, arguments: Sequence[str]) -> None:
    assert json.loads(vbpipe(first, *arguments, "--json").out)


def test_nothing_heavy_is_imported_for_help_check_plan_or_a_second_build(built: Path) -> None:
    heavy = {"torch", "onnx", "onnxruntime", "onnxscript", "transformers", "onnx_ir"}
    build(built)
    for arguments in (["--help"], ["check", "recipes/tiny.yaml"], ["plan", "recipes/tiny.yaml", *QUICK],
                      ["build", "recipes/tiny.yaml", *QUICK], ["store", "ls"]):  # fmt: skip
        code = (
            f"import sys; from vbpipe.cli import run; run({arguments!r}); print(sorted({heavy!r} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=built, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]", (arguments, done.stdout)


def test_no_colour_codes_reach_a_pipe_or_a_terminal_that_wants_none(first: Path) -> None:
    environment = {**os.environ, "NO_COLOR": "1", "FORCE_COLOR": ""}
    command = [sys.executable, "-m", "vbpipe.cli", "report", "artifacts/tiny/report.json"]
    done = subprocess.run(command, cwd=first, env=environment, capture_output=True, check=True)
    assert b"\x1b[" not in done.stdout
