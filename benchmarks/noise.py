"""Ask how often `vbpipe.measure` is wrong here: time an engine against itself, and against copies of known slowness.

python benchmarks/noise.py --trials 20 --delays 0 0.03 0.05                      # a fixed matrix product
python benchmarks/noise.py --bundle artifacts/minilm/cpu/bundle --inputs inputs.npz    # the engine of a bundle
Add --busy to have a bounded busy loop run on the last core meanwhile.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from vbpipe import runtime, samples
from vbpipe.cli.arrays import read_arrays
from vbpipe.measure import Candidate, Scenario, Settings, noise, probe


def main() -> None:
    """Run the trials, print one line each, then a table."""
    asked = _arguments()
    settings = Settings(
        threads=1, min_groups=asked.groups, max_groups=asked.groups, budget_s=asked.budget, margin=asked.margin
    )
    with TemporaryDirectory(prefix="vbpipe-noise-") as folder, _busy(asked.busy):
        candidate, scenario = _engine(asked, Path(folder))
        summaries = noise.run_trials(candidate, scenario, settings, asked.delays, asked.trials, _line)
    print(f"\n{scenario.name}, {asked.trials} trials each, {'with a busy loop beside it' if asked.busy else 'alone'}")
    columns = {"delay": 6, "wrong": 6, "naive wrong": 12, "found": 6, "covered": 8, "+-": 6, "floor": 6, "s each": 7}
    print(" ".join(f"{name:>{width}}" for name, width in columns.items()))
    for s in summaries:
        print(
            f"{s.delay:>6.0%} {s.wrong:>6.0%} {s.naive_wrong:>12.0%} {s.found:>6.0%} {s.covered:>8.0%} "
            f"{s.half_width:>6.1%} {s.floor:>6.1%} {s.seconds:>7.1f}"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--inputs", type=Path, help="arrays (.npz, .safetensors) in place of a golden sample")
    parser.add_argument("--sample", type=int, default=0, help="which of the bundle's golden samples")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.05])
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds a trial")
    parser.add_argument("--margin", type=float, default=0.02)
    parser.add_argument("--busy", action="store_true")
    return parser.parse_args()


def _engine(asked: argparse.Namespace, folder: Path) -> tuple[Candidate, Scenario]:
    path = folder / "inputs.safetensors"
    if asked.bundle is None:
        samples.save_arrays(path, probe.inputs())
        return Candidate("probe", probe.BACKEND, {}, "", Path()), Scenario("matrix product", path)
    manifest = runtime.read_manifest(asked.bundle)
    golden = samples.load(asked.bundle / manifest.golden.inputs)[asked.sample]
    sample = read_arrays(asked.inputs) if asked.inputs else golden
    samples.save_arrays(path, sample)
    runner = manifest.runner
    engine = asked.bundle / manifest.engine
    shapes = " ".join(f"{name}{list(array.shape)}" for name, array in sample.items())
    candidate = Candidate("engine", runner.backend, dict(runner.options), manifest.kind, engine)
    return candidate, Scenario(f"{manifest.name} {manifest.row} {shapes}", path)


@contextmanager
def _busy(wanted: bool) -> Iterator[None]:
    """Keep the last core busy, in bursts, for as long as the block takes and never longer than an hour."""
    if not wanted:
        yield
        return
    child = multiprocessing.Process(target=_burn, args=(3600.0,), daemon=True)
    child.start()
    try:
        yield
    finally:
        child.terminate()
        child.join()


def _burn(limit_s: float) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        burst = time.monotonic() + 0.2
        while time.monotonic() < burst:
            pass
        time.sleep(0.1)


def _line(trial: noise.Trial) -> None:
    print(
        f"delay {trial.delay:4.0%}: {trial.value:.4f} [{trial.low:.4f}, {trial.high:.4f}] true {trial.truth:.4f} "
        f"{trial.verdict:12} floor {trial.floor:6.2%} naive {trial.naive:.3f} {trial.groups} groups "
        f"{trial.seconds:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
