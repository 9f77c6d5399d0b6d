"""`vbpipe bench`: measure again, here."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from vbpipe import measure, runtime, samples
from vbpipe.cli.build import print_report, settings
from vbpipe.cli.progress import reporter
from vbpipe.cli.request import RecipeRequest
from vbpipe.cli.terminal import print_grid, print_json, stderr, stdout
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


def bench_bundles(paths: Sequence[Path], precision: float, budget_s: float, *, as_json: bool) -> None:
    """Time bundles against the first of them, on its first golden sample.

    Raises:
        BundleError: one is damaged.
        UsageError: they were measured with different numbers of threads, or one is given twice.
    """
    manifests = [runtime.read_manifest(path) for path in paths]
    for path, manifest in zip(paths, manifests, strict=True):
        runtime.check_files(path, manifest)
    if len({manifest.runner.threads for manifest in manifests}) > 1:
        raise UsageError("the bundles use different numbers of threads, so their times say nothing of each other.")
    if len(set(map(str, paths))) != len(paths):
        raise UsageError("a bundle is given twice.", hint="The first is measured against itself anyway.")
    candidates = [
        measure.Candidate(str(path), m.runner.backend, dict(m.runner.options), m.kind, path / m.engine)
        for path, m in zip(paths, manifests, strict=True)
    ]
    console = stderr()
    with tempfile.TemporaryDirectory(prefix="vbpipe-bench-") as folder:
        inputs = Path(folder) / "inputs.safetensors"
        sample = samples.load(paths[0] / manifests[0].golden.inputs)[0]
        samples.save_arrays(inputs, sample)
        found = measure.measure(
            candidates,
            [measure.Scenario("golden", inputs)],
            measure.Settings(threads=manifests[0].runner.threads, precision=precision, budget_s=budget_s),
            baseline=candidates[0].name,
            progress=lambda fraction, text: console.print(f"{fraction or 0:.0%} {text}", markup=False, end="\r"),
        )
    if as_json:
        stdout().print_json(found.to_json())
        return
    print_grid(stdout(), _grid(found))


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


def _grid(found: measure.Measurement) -> Grid:
    rows = []
    scenario = found.scenarios[0]
    floor = measure.noise_floor(found, scenario)
    for outcome in found.outcomes:
        name = outcome.candidate
        latency = measure.latency(found, name, scenario)
        if latency is None:
            rows.append((Cell(name), Cell(""), Cell(""), Cell(outcome.status, "bad")))
            continue
        ratio = measure.ratio(found, name, found.baseline, scenario) if name != found.baseline else None
        text = f"{ratio.value:.3f}x [{ratio.low:.3f}, {ratio.high:.3f}]" if ratio else ""
        judged = measure.verdict(ratio, found.settings.margin, floor) if ratio else "baseline"
        rows.append((Cell(name), Cell(f"{latency.p50_ms:.3f} ms"), Cell(text), Cell(judged)))
    return Grid("bundles", ("bundle", "p50", "speed-up over the first", "verdict"), tuple(rows))
