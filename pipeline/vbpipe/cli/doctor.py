"""`vbpipe doctor`: what this host can build and run, and what to do about the rest."""

from __future__ import annotations

import os
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

from vbpipe import measure, plugins
from vbpipe.cli.terminal import facts_table, print_json, stdout, styled
from vbpipe.report.table import Cell
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
    facts = _facts(store)
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
    console.print("[bold]store[/bold]")
    console.print(facts_table(facts["store"]))


def _facts(store: Path) -> dict[str, Any]:
    return {
        "host": dict(measure.host_identity()),
        "packages": {name: _version(name) or f"missing: {how}" for name, how in _PACKAGES.items()},
        "backends": {n: configured(Runner(backend=n)).unavailable() for n in sorted(plugins.names("backends"))},
        "store": _store(store),
    }


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
