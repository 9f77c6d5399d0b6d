"""`vbpipe build`: run the plan, then the table, then the verdict."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vbpipe.cli.deliver import PREVIOUS, deliver_bundle, write_reports
from vbpipe.cli.progress import reporter
from vbpipe.cli.request import RecipeRequest
from vbpipe.cli.terminal import print_grid, print_json, stderr, stdout, styled
from vbpipe.report import Cell, conclusions, grid, make_report
from vbpipe.run.executor import RunSettings, execute
from vbpipe.store import Store


@dataclass(frozen=True)
class BuildPlaces:
    """Where a build keeps its cache, and where it leaves reports and bundles."""

    store: Path
    out: Path


def build_recipe(
    request: RecipeRequest,
    places: BuildPlaces,
    jobs: int,
    timeout_s: float | None,
    *,
    as_json: bool,
    allow_pending: bool = False,
) -> int:
    """Build a recipe, print what came of it, and return the exit code."""
    loaded, plan = request.open()
    console = stderr()
    with reporter(console, plan) as watching:
        store = Store(places.store.absolute(), warn=watching.warn)
        results = execute(plan, store, settings(loaded.root, jobs, timeout_s), watching)
    report = make_report(plan, results, recipe_digest=loaded.digest, allow_pending=allow_pending)
    folder = places.out / loaded.name
    for target in plan.targets:
        step = plan.finals[target].get("package")
        artifact = results[step].artifact if step is not None and step in results else None
        report["targets"][target]["bundle_path"] = deliver_bundle(artifact, folder / target)
    written = write_reports(report, folder)
    if as_json:
        print_json(report)
    else:
        print_report(report)
        for target in plan.targets:
            if report["targets"][target]["bundle_path"] is None and (folder / target / PREVIOUS).exists():
                place = folder / target / PREVIOUS
                stdout().print(f"the bundle of an earlier build is kept in {place}", markup=False, soft_wrap=True)
        stdout().print(f"report: {written}", markup=False)
    return int(report["exit_code"])


def settings(root: Path, jobs: int, timeout_s: float | None) -> RunSettings:
    """Return how to run on this host: by default as many steps at a time as there are cores, at most four."""
    cores = len(os.sched_getaffinity(0))
    at_a_time = jobs or min(4, cores)
    return RunSettings(root=root, jobs=at_a_time, threads=max(1, min(4, cores // at_a_time)), timeout_s=timeout_s)


def print_report(report: Mapping[str, Any]) -> None:
    """Print the table and the conclusions of every target."""
    console = stdout()
    for target, facts in report["targets"].items():
        console.print()
        table = grid(report, target)
        if table is not None:
            print_grid(console, table)
        for sentence in conclusions(report, target):
            console.print(styled(sentence), soft_wrap=True)
        if facts.get("bundle_path"):
            console.print(f"bundle: {facts['bundle_path']}", markup=False, soft_wrap=True)
    skipped = sum(step["status"] == "skipped" for step in report["steps"])
    if skipped:
        console.print(f"{skipped} steps were skipped, because something that they read was not built.")
    verdicts = ((facts, facts["verdict"]) for facts in report["targets"].values())
    judged = (facts for facts, verdict in verdicts if verdict is not None and not verdict.get("pending"))
    for sentence in dict.fromkeys(facts.get("ceilings_missing") for facts in judged):
        if sentence:
            console.print(styled(Cell(f"report.md has no shares of ceilings: {sentence}", "faint")), soft_wrap=True)
