"""`vbpipe doctor`: what this host can build and run, and what to do about the rest."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from vbpipe import measure, plugins
from vbpipe.cli.terminal import facts_table, print_grid, print_json, stderr, stdout, styled
from vbpipe.measure import ceilings
from vbpipe.measure.ceilings import Ceilings, Known
from vbpipe.report.table import Cell, Grid
from vbpipe.runner import Runner, configured

_PACKAGES = {
    "numpy": "pip install vbpipe",
    "onnxruntime": "pip install 'vbpipe[runtime]'",
    "torch": "pip install 'vbpipe[build]'",
    "onnx": "pip install 'vbpipe[build]'",
    "onnxscript": "pip install 'vbpipe[build]'",
}


def examine(store: Path, *, as_json: bool) -> None:
    """Print the host's facts, the packages, and for each backend whether it can be used here."""
    known = _known()
    facts = _facts(store, known)
    if as_json:
        print_json(facts)
        return
    console = stdout()
    for part in ("host", "packages"):
        console.print(f"[bold]{part}[/bold]")
        console.print(facts_table(facts[part]))
    console.print("[bold]backends[/bold]")
    for name, reason in facts["backends"].items():
        cell = Cell(f"{name}: ready", "good") if reason is None else Cell(f"{name}: {reason}", "doubtful")
        console.print(styled(cell), soft_wrap=True)
    console.print("[bold]ceilings[/bold]")
    for sentence in _ceilings(known):
        console.print(styled(sentence), soft_wrap=True)
    console.print("[bold]store[/bold]")
    console.print(facts_table(facts["store"]))


def measure_here(threads: Sequence[int], *, as_json: bool, array_bytes: int | None = None) -> None:
    """Measure what this host can do at most, keep it for reports and for `examine`, and print it.

    Args:
        threads: the numbers of threads to measure with; one and all cores when empty.
        array_bytes: as `measure_ceilings` takes it.

    Raises:
        EngineError: something can't be measured.
        UsageError: the results, which have been printed, can't be kept.
    """
    counts = sorted(set(threads)) or ceilings.usual_threads()
    found: dict[str, list[Ceilings]] = {}
    for backend in ceilings.measurable():
        for count in counts:
            stderr().print(f"  {backend}, {ceilings.counted(count)}: about ten seconds", markup=False)
            found.setdefault(backend, []).append(ceilings.measure_ceilings(backend, count, array_bytes))
    if as_json:
        print_json({"ceilings": {backend: [asdict(one) for one in measured] for backend, measured in found.items()}})
    for backend, measured in found.items():
        if not as_json:
            print_grid(stdout(), _grid(backend, measured))
        stderr().print(f"kept in {ceilings.save(ceilings.host_key(backend), measured)}", markup=False, soft_wrap=True)
    if not found:
        stderr().print("no backend that is ready here can be measured", markup=False)


def _facts(store: Path, known: Mapping[str, Known]) -> dict[str, Any]:
    return {
        "host": dict(measure.host_identity()),
        "packages": {name: _version(name) or f"missing: {how}" for name, how in _PACKAGES.items()},
        "backends": {n: configured(Runner(backend=n)).unavailable() for n in sorted(plugins.names("backends"))},
        "ceilings": {name: asdict(one) for name, one in known.items()},
        "store": _store(store),
    }


def _known() -> dict[str, Known]:
    return {name: ceilings.load(ceilings.host_key(name)) for name in ceilings.measurable()}


def _ceilings(known: Mapping[str, Known]) -> Sequence[Cell]:
    """Return a line for everything that was measured, and for what can't be used or was not measured."""
    lines = []
    for name, here in known.items():
        for one in here.found:
            when = one.taken[:10]
            lines.append(Cell(f"{name}, {ceilings.counted(one.threads)}: {one.describe()} ({when})"))
        if here.problem:
            lines.append(Cell(here.problem, "doubtful"))
        if not here.found:
            lines.append(Cell(f"{name}: not measured: {ceilings.COMMAND}", "doubtful"))
    return lines


def _grid(backend: str, measured: Sequence[Ceilings]) -> Grid:
    """Return a table with a row for each number of threads."""
    rates = list(dict.fromkeys(name for one in measured for name in one.rates))
    columns = ("threads", "memory GB/s", *(f"{name} {ceilings.unit(name)}" for name in rates))
    rows = []
    for one in measured:
        memory = "" if one.bandwidth_gb_s is None else f"{one.bandwidth_gb_s:.1f}"
        shown = (f"{one.rates[name]:.0f}" if name in one.rates else "" for name in rates)
        rows.append(tuple(Cell(text) for text in (str(one.threads), memory, *shown)))
    title = f"{backend} at its best; bytes read and written both count, a multiply-add is two operations"
    return Grid(title, columns, tuple(rows))


def _version(name: str) -> str | None:
    # onnxruntime comes under two names that hold the same files.
    for candidate in (name, f"{name}-gpu"):
        try:
            return f"{metadata.version(candidate)}{'' if candidate == name else ' (gpu)'}"
        except metadata.PackageNotFoundError:
            continue
    return None


def _store(store: Path) -> dict[str, str]:
    there = store.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    writable = "yes" if os.access(there, os.W_OK) else f"no: give write permission on {there}, or use --store"
    return {"folder": str(store), "writable": writable, "free": f"{free / 2**30:.1f} GiB"}
