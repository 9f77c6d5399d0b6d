"""`vbpipe doctor --noise`: how far measurements on this host can be trusted, and what would help."""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from vbpipe import samples
from vbpipe.cli.terminal import print_grid, print_json, stderr, stdout
from vbpipe.measure import Candidate, Scenario, Settings, noise, probe
from vbpipe.report import Cell, Grid

DELAYS = (0.0, 0.03, 0.05)


def try_noise(trials: int, budget_s: float, *, as_json: bool) -> None:
    """Time a fixed workload against copies of itself, slower by known shares, and print how often that fails."""
    console = stderr()
    settings = Settings(threads=1, min_groups=8, max_groups=8, budget_s=budget_s)
    seconds = trials * len(DELAYS) * (budget_s + 2)
    console.print(f"{trials} trials of each of {len(DELAYS)} delays, about {seconds / 60:.0f} minutes", markup=False)
    with tempfile.TemporaryDirectory(prefix="vbpipe-noise-") as folder:
        inputs = Path(folder) / "inputs.safetensors"
        samples.save_arrays(inputs, probe.inputs())
        found = noise.run_trials(
            Candidate("probe", probe.BACKEND, {}, "", Path()),
            Scenario("probe", inputs),
            settings,
            DELAYS,
            trials,
            lambda trial: console.print(f"  delay {trial.delay:.0%}: {trial.verdict}", markup=False),
        )
    smallest = noise.reliably_found(found)
    advice = noise.advice(found, len(os.sched_getaffinity(0)), os.getloadavg()[0])
    if as_json:
        print_json({"delays": [_as_json(one) for one in found], "reliably_found": smallest, "advice": advice})
        return
    rows = tuple(_row(one) for one in found)
    columns = (
        "really slower by",
        "wrong verdicts",
        "naive wrong",
        "found slower",
        "interval holds truth",
        "+-",
        "noise floor",
    )
    console = stdout()
    print_grid(console, Grid(f"{trials} trials each, {budget_s:g} s a trial", columns, rows))
    told = f"differences from {smallest:.0%} on" if smallest else "none of these differences"
    console.print(f"found in at least {noise.RELIABLE:.0%} of trials: {told}", markup=False, soft_wrap=True)
    for sentence in advice:
        console.print(sentence, markup=False, soft_wrap=True)


def _as_json(one: noise.NoiseSummary) -> dict[str, float | None]:
    """Return the figures; what has no bound is null, for JSON knows no infinity."""
    return {name: value if math.isfinite(value) else None for name, value in asdict(one).items()}


def _row(one: noise.NoiseSummary) -> tuple[Cell, ...]:
    naive = f"{one.naive_wrong:.0%}" if one.delay == 0 else ""
    slower = f"{one.found:.0%}" if one.delay else ""
    shares = (f"{one.delay:.0%}", f"{one.wrong:.0%}", naive, slower, f"{one.covered:.0%}")
    return tuple(Cell(text) for text in (*shares, f"{one.half_width:.1%}", f"{one.floor:.1%}"))
