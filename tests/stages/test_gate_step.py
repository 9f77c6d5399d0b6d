"""The gate step on measurements made up for the purpose: what it judges together, and what it reads besides."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from vbpipe import decide
from vbpipe.core import Artifact, Site
from vbpipe.errors import UsageError
from vbpipe.measure import Measurement, Outcome, ScenarioRun, Settings, WorkerRun, host_facts, host_identity, ratio
from vbpipe.measure.record import Group
from vbpipe.recipe.model import Gate as Rule
from vbpipe.recipe.model import StoredReport
from vbpipe_stages._damage import ModuleDamage, write_damage
from vbpipe_stages.benchmark import SUBJECTS, WORK
from vbpipe_stages.gate import Gate

HOST = host_facts()
S = "batch=1"
SETTINGS = Settings(min_groups=8, max_groups=8)
SUBJECT_FACTS = {"recipe": "m", "gpu": "none seen", "libraries": {"numpy": "2.0"}}


def measurement(speedups: Mapping[str, Sequence[float]]) -> Measurement:
    """Row name to its ratio over eager in each group; eager and its control are always alike."""
    groups = len(next(iter(speedups.values())))
    rows = {"eager": [1.0] * groups, **speedups, "eager#aa": [1.0] * groups}
    made = tuple(
        Group(tuple(worker(name, ratios[i]) for name, ratios in rows.items()), {}, 1.0, 0.5, 0.0, 0.0, 0, 0.0)
        for i in range(groups)
    )
    outcomes = tuple(Outcome(name, "measured") for name in rows)
    return Measurement("eager", "eager#aa", (S,), SETTINGS, HOST, 1.0, made, outcomes)


def worker(name: str, speedup: float) -> WorkerRun:
    run = ScenarioRun(1.0, (1, 1), True, ((round(1e9 / speedup),),) * 4, 1.0)
    return WorkerRun(name, 1.0, 0.5, 100.0, 0, 0, (0,), {S: run})


def equal_rows(count: int, seed: int, groups: int = 8) -> dict[str, list[float]]:
    generator = random.Random(seed)
    return {f"v{i}/engine": [generator.lognormvariate(0, 0.02) for _ in range(groups)] for i in range(count)}


def judge(
    folder: Path,
    speedups: Mapping[str, Sequence[float]],
    *gates: Rule,
    cosine: float = 1.0,
    damage: Sequence[ModuleDamage] = (),
) -> dict[str, Any]:
    """Run the step on variants that have one row each, all with outputs like eager's up to `cosine`."""
    found = measurement(speedups)
    inputs = {"measurement": Artifact("measurement", "m", folder / "measurement", {})}
    inputs["measurement"].path.mkdir(parents=True)
    found.save(inputs["measurement"].path)
    (inputs["measurement"].path / WORK).write_text(json.dumps({S: {"flops": 1.0, "io_bytes": 1.0, "rows": 1}}))
    (inputs["measurement"].path / SUBJECTS).write_text(json.dumps(SUBJECT_FACTS))
    for name in ("eager", *speedups):
        inputs[name] = artifact(folder, name, {"weights": "w" * 100})
        if damage and name != "eager":
            write_damage(damage, inputs[name].path)
        metrics = {key: {"value": value} for key, value in {"cosine": cosine, "sqnr_db": 40.0, "accuracy": 0.9}.items()}
        inputs[f"{name}@evaluate"] = artifact(folder, f"{name}@evaluate", {"metrics.json": json.dumps(metrics)})
    chains = {name.split("/")[0]: ("eager", name) for name in speedups}
    stage = Gate(gates=gates, chains=chains, previous=dict.fromkeys(speedups, "eager"), target="cpu")
    out = folder / "out"
    out.mkdir()
    stage.run(inputs, out, Site(folder))
    verdict: dict[str, Any] = json.loads((out / "verdict.json").read_text())
    return verdict


def artifact(folder: Path, name: str, files: Mapping[str, str]) -> Artifact:
    path = folder / name.replace("/", "-")
    path.mkdir()
    for file, text in files.items():
        (path / file).write_text(text)
    return Artifact("reference" if name == "eager" else "engine", name, path, {})


def report(folder: Path, verdict: Mapping[str, Any], **host: str) -> StoredReport:
    """Keep a verdict as a report of an earlier build."""
    changed = {**verdict, "host": {**verdict["host"], **host}}
    body = {"report": 1, "recipe": {"name": "m"}, "targets": {"cpu": {"threads": SETTINGS.threads, "verdict": changed}}}
    folder.mkdir(exist_ok=True)
    (folder / "last.json").write_text(json.dumps(body))
    return StoredReport(report="last.json")


def speedup_results(verdict: Mapping[str, Any], row: str = "v0/engine") -> list[tuple[str, str]]:
    return [(g["outcome"], g["reason"]) for g in verdict["rows"][row]["gates"] if g["gate"].startswith("speedup")]


def test_many_equal_candidates_pass_by_luck_no_more_often_than_one_may() -> None:
    """20 candidates as fast as eager: at 95 % each, every other build would find one that passes."""
    lucky = uncorrected = 0
    builds = 100
    for seed in range(builds):
        rows = equal_rows(20, seed)
        found = measurement(rows)
        names = ("eager", *rows)
        asked = decide.Compare({}, {}, {}, {S: 0.0})
        together = len(decide.judged_together(names, (), asked))
        assert together == 20
        lucky += any(_passes(found, name, together) for name in rows)
        uncorrected += any(_passes(found, name, 1) for name in rows)
    # One side of the interval counts, so 2.5 are expected, and 1 - 0.975 ** 20 = 40 without the correction.
    assert lucky <= 7
    assert uncorrected >= 25


def _passes(found: Measurement, name: str, comparisons: int) -> bool:
    r = ratio(found, name, "eager", S, comparisons=comparisons)
    figures = {(name, "eager"): {S: decide.Figure(r.value, r.low, r.high)}}
    compare = decide.Compare(figures, {}, {}, {S: 0.0}, comparisons=comparisons)
    assert compare.level == pytest.approx(r.level)
    row = decide.Row(name, figures[name, "eager"], {"cosine": decide.Figure(1.0), "sqnr_db": decide.Figure(40.0)})
    return decide.worst(decide.judge_row(row, {name: row}, (), compare)) == "pass"


def test_the_step_judges_with_the_corrected_interval_and_shows_that_of_95_percent(tmp_path: Path) -> None:
    # A row whose 95 % interval lies above 1, and whose 99.75 % interval does not.
    doubtful = [1.03, 1.01, 1.00, 1.04, 1.02, 0.99, 1.03, 1.02]
    rows = {**equal_rows(20, seed=3), "v0/engine": doubtful}
    verdict = judge(tmp_path, rows)
    assert verdict["judged_together"] == 20
    assert verdict["rows"]["v0/engine"]["ratios"][S]["low"] > 1.0
    ((outcome, reason),) = speedup_results(verdict)
    assert outcome == "inconclusive"
    assert "(99.8 %, one of 20 judged together)" in reason
    alone = judge(tmp_path / "alone", {"v0/engine": doubtful})
    assert [outcome for outcome, _ in speedup_results(alone)] == ["pass"]


def test_the_verdict_says_what_libraries_and_what_gpu_there_were(tmp_path: Path) -> None:
    verdict = judge(tmp_path, {"v0/engine": [2.0, 2.1] * 4})
    assert (verdict["gpu"], verdict["libraries"]) == ("none seen", {"numpy": "2.0"})


def test_a_variant_too_far_from_eager_is_told_which_modules_are_the_reason(tmp_path: Path) -> None:
    damage = [ModuleDamage("block.up", 20.0, 0.01), ModuleDamage("block.down", 9.0, 0.12)]
    verdict = judge(tmp_path / "far", {"v0/engine": [2.0, 2.1] * 4}, cosine=0.95, damage=damage)
    reason = verdict["variants"]["v0"]["reasons"][-1]
    assert reason.startswith("v0/engine: the first module below 16.9 dB is block.down (9.0 dB).")
    assert "{match: 'block.down', keep: true}" in reason
    near = judge(tmp_path / "near", {"v0/engine": [2.0, 2.1] * 4}, cosine=0.995, damage=damage)
    assert near["variants"]["v0"]["reasons"] == []
    slow = judge(tmp_path / "slow", {"v0/engine": [0.5, 0.51] * 4}, cosine=0.995, damage=damage)
    assert not any("block" in reason for reason in slow["variants"]["v0"]["reasons"])


def test_a_build_is_judged_against_an_earlier_one(tmp_path: Path) -> None:
    earlier = judge(tmp_path / "earlier", {"v0/engine": [2.0, 2.02, 1.98, 2.0] * 2})
    outcomes = {}
    for speed in (1.8, 2.2, 2.0):
        here = tmp_path / str(speed)
        gate = Rule(metric="speedup", over=report(here, earlier), min=1.0)
        verdict = judge(here, {"v0/engine": [speed, speed * 1.01, speed * 0.99, speed] * 2}, gate)
        outcomes[speed] = speedup_results(verdict)[0]
    assert {speed: outcome for speed, (outcome, _) in outcomes.items()} == {
        1.8: "fail", 2.2: "pass", 2.0: "inconclusive",
    }  # fmt: skip
    # over eager, which is implied, and over the report
    assert "over the same step in last.json >= 1: 0.900x [" in outcomes[1.8][1]
    assert "(97.5 %, one of 2 judged together)" in outcomes[1.8][1]


def test_an_unequal_host_leaves_speed_undecided_and_quality_decided(tmp_path: Path) -> None:
    earlier = judge(tmp_path / "earlier", {"v0/engine": [1.0, 1.01] * 4})
    over = report(tmp_path / "now", earlier, processor="Another CPU", kernel="another")
    gates = (
        Rule(metric="speedup", over=over, min=1.0),
        Rule(metric="accuracy", over=over, max_drop=0.01),
    )
    found = judge(tmp_path / "now", {"v0/engine": [2.0, 2.01] * 4}, *gates)["rows"]["v0/engine"]["gates"][:2]
    assert [result["outcome"] for result in found] == ["inconclusive", "pass"]
    ours = host_identity()["processor"]
    assert f"processor: {ours} here, Another CPU there)" in found[0]["reason"]


def test_another_kernel_is_no_other_host(tmp_path: Path) -> None:
    earlier = judge(tmp_path / "earlier", {"v0/engine": [1.0, 1.01] * 4})
    gate = Rule(metric="speedup", over=report(tmp_path / "now", earlier, kernel="another"), min=1.0)
    verdict = judge(tmp_path / "now", {"v0/engine": [2.0, 2.01] * 4}, gate)
    assert speedup_results(verdict)[0][0] == "pass"


def test_a_report_that_lacks_the_step_the_scenario_or_the_target_is_an_error_of_usage(tmp_path: Path) -> None:
    earlier = judge(tmp_path / "earlier", {"v0/engine": [1.0, 1.01] * 4})
    rows = {"v1/engine": [2.0, 2.01] * 4}
    gate = Rule(metric="speedup", over=report(tmp_path / "step", earlier), min=1.0)
    with pytest.raises(UsageError, match="it has no step 'v1/engine'; it has eager, v0/engine"):
        judge(tmp_path / "step", rows, gate)
    earlier["rows"]["v1/engine"] = {**earlier["rows"]["v0/engine"], "ratios": {}}
    report(tmp_path / "scenario", earlier)
    with pytest.raises(UsageError, match="it has no speed-up of 'v1/engine' at batch=1; it has none"):
        judge(tmp_path / "scenario", rows, gate)
    with pytest.raises(UsageError, match="eager is what both builds are compared with"):
        report(tmp_path / "eager", earlier)
        eager = Rule(metric="speedup", over=StoredReport(report="last.json", row="eager"), min=1.0)
        judge(tmp_path / "eager", rows, eager)
    with pytest.raises(UsageError, match="can't be read"):
        judge(tmp_path / "missing", rows, gate)


def test_the_content_of_a_stored_report_is_part_of_the_key(tmp_path: Path) -> None:
    stage = Gate(gates=(Rule(metric="speedup", over=StoredReport(report="last.json"), min=1.0),))
    with pytest.raises(UsageError, match=r"last\.json: the report that a gate compares with can't be read"):
        stage.fingerprint(tmp_path)
    keys = []
    for text in ("a", "b"):
        (tmp_path / "last.json").write_text(text)
        keys.append(stage.fingerprint(tmp_path)["report.last.json"])
    assert keys[0] != keys[1]
    assert set(Gate(gates=()).fingerprint(tmp_path)) == {"vbpipe"}
