"""`vbpipe bench`: measure again, here."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from vbpipe import measure, samples
from vbpipe.cli.arrays import read_arrays
from vbpipe.cli.build import print_report, settings
from vbpipe.cli.candidates import Found, find, sample_for
from vbpipe.cli.progress import bench_view, reporter
from vbpipe.cli.request import RecipeRequest
from vbpipe.cli.terminal import print_grid, print_json, stderr, stdout, styled
from vbpipe.errors import UsageError
from vbpipe.plan import Plan
from vbpipe.report import Cell, Grid, make_report
from vbpipe.run.executor import execute
from vbpipe.store import Store


def bench_recipe(request: RecipeRequest, store: Path, *, as_json: bool) -> int:
    """Build what is missing, time every row anew, print the table and return the exit code; packages nothing."""
    loaded, plan = request.open()
    again = _measured_anew(plan)
    with reporter(stderr(), again) as watching:
        opened = Store(store.absolute(), warn=watching.warn)
        results = execute(again, opened, settings(loaded.root, 0, None), watching)
    report = make_report(again, results, recipe_digest=loaded.digest)
    if as_json:
        print_json(report)
    else:
        print_report(report)
    return int(report["exit_code"])


@dataclass(frozen=True)
class BenchRequest:
    """Things to time against each other, and how long."""

    what: tuple[str, ...]
    inputs: Path | None
    store: Path
    threads: int | None
    precision: float
    budget_s: float


def bench_things(request: BenchRequest, *, as_json: bool) -> None:
    """Time bundles, stored steps, files and eager models against the first of them.

    Raises:
        UsageError: one does not exist or is given twice, or they were measured with different numbers of threads.
        BundleError: a bundle is damaged.
    """
    if len(set(request.what)) != len(request.what):
        raise UsageError("one thing is given twice.", hint="The first is measured against itself anyway.")
    inputs = read_arrays(request.inputs) if request.inputs else None
    store = Store(request.store.absolute())
    with tempfile.TemporaryDirectory(prefix="vbpipe-bench-") as name:
        folder = Path(name)
        (folder / "files").mkdir()
        found = [find(what, store, inputs, folder / "files") for what in request.what]
        samples.save_arrays(folder / "inputs.safetensors", sample_for(found, inputs))
        settings = measure.Settings(
            threads=request.threads or _threads(found), precision=request.precision, budget_s=request.budget_s
        )
        scenarios = [measure.Scenario("inputs", folder / "inputs.safetensors")]
        candidates = [one.candidate for one in found]
        with bench_view(stderr()) as progress:
            measured = measure.measure(candidates, scenarios, settings, baseline=candidates[0].name, progress=progress)
    if as_json:
        print_json({**_summary(measured), "measurement": json.loads(measured.to_json())})
        return
    print_grid(stdout(), _grid(measured))
    for problem in measured.problems:
        stdout().print(styled(Cell(f"doubt: {problem}", "doubtful")), soft_wrap=True)


def _threads(found: Sequence[Found]) -> int:
    asked = {one.threads for one in found if one.threads is not None}
    if len(asked) > 1:
        raise UsageError(
            f"they were measured with different numbers of threads ({sorted(asked)}), which can't be compared.",
            hint="Give all the same with --threads.",
        )
    return asked.pop() if asked else 1


def _measured_anew(plan: Plan) -> Plan:
    """Return the plan with benchmarks that no earlier result can stand for, and without packaging."""
    steps = dict(plan.steps)
    for finals in plan.finals.values():
        benchmark, package = finals.get("benchmark"), finals.get("package")
        if benchmark is not None:
            step = steps[benchmark]
            assert isinstance(step.stage, BaseModel)
            stage = step.stage.model_copy(update={"taken": time.time_ns()})
            steps[benchmark] = dataclasses.replace(step, stage=stage)
        if package is not None:
            del steps[package]
    closing = {target: _without_package(final) for target, final in plan.finals.items()}
    return dataclasses.replace(plan, steps=steps, finals=closing)


def _without_package(finals: Mapping[str, str]) -> Mapping[str, str]:
    return {name: step for name, step in finals.items() if name != "package"}


def _summary(found: measure.Measurement) -> dict[str, Any]:
    scenario, floor = found.scenarios[0], measure.noise_floor(found)
    rows: dict[str, Any] = {}
    for outcome in found.outcomes:
        name = outcome.candidate
        row: dict[str, Any] = {"status": outcome.status, "message": outcome.message}
        latency, cold = measure.latency(found, name, scenario), measure.cold_start(found, name)
        if latency is not None and cold is not None and outcome.status == "measured":
            row |= {"latency": asdict(latency), "cold": asdict(cold)}
            if name != found.baseline:
                ratio = measure.ratio(found, name, found.baseline, scenario)
                row["speedup"] = {"value": ratio.value, "low": ratio.low, "high": ratio.high, "groups": ratio.groups}
                row["verdict"] = measure.verdict(ratio, found.settings.margin, floor)
        rows[name] = row
    return {"baseline": found.baseline, "noise_floor": floor, "rows": rows}


def _grid(found: measure.Measurement) -> Grid:
    summary = _summary(found)
    rows = []
    for name, row in summary["rows"].items():
        if "latency" not in row:
            rows.append((Cell(name), *(Cell("") for _ in range(5)), Cell(f"{row['status']}: {row['message']}", "bad")))
            continue
        latency, cold, ratio = row["latency"], row["cold"], row.get("speedup")
        rows.append((
            Cell(name),
            Cell(f"{latency['p50_ms']:.3f}"),
            Cell(f"{latency['p90_ms']:.3f}"),
            Cell(f"{cold['load_s']:.2f}"),
            Cell(f"{cold['peak_rss_mib']:.0f}"),
            Cell(f"{ratio['value']:.3f}x [{ratio['low']:.3f}, {ratio['high']:.3f}]" if ratio else ""),
            Cell(row.get("verdict", "baseline")),
        ))  # fmt: skip
    columns = ("what", "p50 ms", "p90 ms", "load s", "peak MiB", "speed-up over the first", "verdict")
    return Grid(f"noise floor {summary['noise_floor']:.1%}, {len(found.groups)} groups", columns, tuple(rows))
