"""Kill a build at random moments, again and again, and show that nothing finished is lost, damaged or done twice.

python benchmarks/kill.py RECIPE [--kills 20] [-- further arguments of vbpipe build]
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vbpipe.store import Store

MEASURED = {"measurement", "verdict", "bundle"}
"""Kinds whose bytes hold times: they differ between two builds that never met."""


def main() -> int:
    """Build once untouched, then in a second store under kills; compare, and return 1 on any difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked, further = parser.parse_known_args()
    further = [word for word in further if word != "--"]
    with tempfile.TemporaryDirectory(prefix="vbpipe-kill-") as folder:
        return _trial(asked, further, Path(folder))


def _trial(asked: argparse.Namespace, further: list[str], folder: Path) -> int:
    began = time.monotonic()
    want = _digests(_build(asked.recipe, folder / "whole", further))
    whole_s = time.monotonic() - began
    print(f"untouched build: {len(want)} steps, {whole_s:.0f} s")
    times, lost, damaged, kills, landed = random.Random(asked.seed), 0, 0, 0, folder / "killed"
    finished: dict[str, float] = {}
    while kills < asked.kills:
        child = subprocess.Popen(_command(asked.recipe, landed, further), stdout=-3, stderr=-3)
        wait_s = times.uniform(0.5, whole_s / 12)
        try:
            child.wait(wait_s)
            state = "ended by itself; the store is emptied of it"
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            child.wait()
            kills, state = kills + 1, "killed"
        store = Store(landed / "store")
        now = {entry.key.digest: entry.created_s for entry in store.entries()}
        # An entry that is gone was lost; one that is newer than before was made twice.
        lost += sum(key not in now or now[key] != created for key, created in finished.items())
        damaged += len(store.verify().damaged)
        finished = now
        print(f"{kills:>3} {state} after {wait_s:5.1f} s: {len(finished):>3} steps in the store")
        if state != "killed":
            landed, finished = folder / f"killed-{kills}", {}
    got = _digests(_build(asked.recipe, landed, further))
    different = [name for name in want if got.get(name) != want[name]]
    print(f"lost or made twice: {lost}; damaged: {damaged}; digests that differ: {len(different)} of {len(want)}")
    return int(bool(lost or damaged or different))


def _command(recipe: Path, folder: Path, further: list[str]) -> list[str]:
    places = ["--store", str(folder / "store"), "--out", str(folder / "out")]
    return [sys.executable, "-m", "vbpipe.cli", "build", str(recipe), *places, *further]


def _build(recipe: Path, folder: Path, further: list[str]) -> Path:
    subprocess.run(_command(recipe, folder, further), stdout=-3, stderr=-3, check=False)
    return next((folder / "out").glob("*/report.json"))


def _digests(report: Path) -> dict[str, str]:
    steps = json.loads(report.read_text())["steps"]
    return {step["identities"][0]: step["digest"] for step in steps if step["kind"] not in MEASURED}


if __name__ == "__main__":
    sys.exit(main())
