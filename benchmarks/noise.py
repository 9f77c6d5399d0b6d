"""Ask how often `vbpipe.measure` is wrong here: time one engine against itself, then against itself plus a known delay.

python benchmarks/noise.py --trials 5                                   # a matrix product in numpy
python benchmarks/noise.py onnxruntime onnx DIRECTORY INPUTS.safetensors --delay 0.05
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.numpy import save_file

from vbpipe.measure import Candidate, Measurement, Scenario, Settings, latency, measure, noise_floor, ratio, verdict

PLUGIN = '''
"""Any backend with a busy wait added to every call."""
import contextlib, time
import numpy as np
from vbpipe import plugins


class Delayed:
    name, source, runs, contrib_operators = "delayed", "onnx", frozenset({"engine"}), False

    def __init__(self, backend, delay_us):
        self.backend, self.delay_us = backend, delay_us

    @contextlib.contextmanager
    def open(self, kind, path, threads, root=None):
        with contextlib.ExitStack() as stack:
            run = product
            if self.backend:
                run = stack.enter_context(plugins.backend(self.backend)().open(kind, path, threads, root))

            def delayed(inputs):
                outputs = run(inputs)
                end = time.perf_counter_ns() + int(self.delay_us * 1000)
                while time.perf_counter_ns() < end:
                    pass
                return outputs

            yield delayed


def product(inputs):
    value = inputs["x"]
    for _ in range(4):
        value = np.tanh(value @ inputs["x"])
    return {"y": value}


PLUGIN = Delayed
'''


@dataclass(frozen=True)
class Trial:
    """One measurement of two candidates whose true ratio is known."""

    found: Measurement
    truth: float


def main() -> None:
    """Run the trials and print one line each, then the share of wrong answers."""
    asked = _arguments()
    settings = Settings(
        threads=asked.threads,
        min_groups=asked.groups,
        max_groups=asked.groups,
        budget_s=asked.budget,
    )
    with TemporaryDirectory() as folder:
        _install(Path(folder))
        inputs = asked.inputs or _numpy_inputs(Path(folder))
        pilot = _trial(asked, inputs, settings, 0.0)
        typical = latency(pilot.found, "base", "inputs")
        assert typical is not None, f"the engine can't be timed: {pilot.found.outcomes}"
        print(f"one call takes {typical.p50_ms:.3f} ms (median)")
        delay_us = asked.delay * typical.p50_ms * 1000
        same = [_trial(asked, inputs, settings, 0.0) for _ in range(asked.trials)]
        slower = [_trial(asked, inputs, settings, delay_us) for _ in range(asked.trials)]
    _report("A/A", same)
    _report(f"A/A + {asked.delay:.0%}", slower)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", nargs="?", default="")
    parser.add_argument("kind", nargs="?", default="engine")
    parser.add_argument("path", nargs="?", type=Path, default=Path())
    parser.add_argument("inputs", nargs="?", type=Path)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--budget", type=float, default=30.0, help="seconds a trial")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--delay", type=float, default=0.05, help="share of a call")
    return parser.parse_args()


def _install(folder: Path) -> None:
    """Make the delaying backend an installed plug-in of the worker processes."""
    backends = folder / "vbpipe_noise" / "backends"
    backends.mkdir(parents=True)
    (backends.parent / "__init__.py").touch()
    (backends / "__init__.py").touch()
    (backends / "delayed.py").write_text(PLUGIN)
    info = folder / "vbpipe_noise-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vbpipe-noise\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vbpipe.plugins]\nnoise = vbpipe_noise\n")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def _numpy_inputs(folder: Path) -> Path:
    path = folder / "inputs.safetensors"
    save_file({"x": np.random.default_rng(0).standard_normal((256, 256), dtype=np.float32)}, path)
    return path


def _trial(asked: argparse.Namespace, inputs: Path, settings: Settings, delay_us: float) -> Trial:
    def candidate(name: str, wait_us: float) -> Candidate:
        return Candidate(name, "delayed", {"backend": asked.backend, "delay_us": wait_us}, asked.kind, asked.path)

    pair = (candidate("base", 0.0), candidate("other", delay_us))
    found = measure(pair, (Scenario("inputs", inputs),), settings, baseline="base")
    print(".", end="", file=sys.stderr, flush=True)
    return Trial(found, 1 / (1 + asked.delay) if delay_us else 1.0)


def _report(title: str, trials: list[Trial]) -> None:
    missed = wrong = 0
    print(f"\n{title}")
    for trial in trials:
        found = ratio(trial.found, "other", "base", "inputs")
        floor = noise_floor(trial.found)
        judged = verdict(found, trial.found.settings.margin, floor)
        missed += not found.low <= trial.truth <= found.high
        wrong += judged == "faster" or judged == ("slower" if trial.truth == 1.0 else "same")
        problems = ", ".join(concern.code for concern in trial.found.problems) or "no concerns"
        print(
            f"  {found.value:.4f} [{found.low:.4f}, {found.high:.4f}] {judged:12} floor {floor:.2%}  "
            f"{found.groups} groups, {trial.found.elapsed_s:.0f} s, {problems}"
        )
    widths = [ratio(trial.found, "other", "base", "inputs").half_width for trial in trials]
    typical = sorted(widths)[len(widths) // 2] if widths else math.nan
    print(f"  true ratio outside the interval: {missed} of {len(trials)}; wrong verdicts: {wrong}; +-{typical:.2%}")


if __name__ == "__main__":
    main()
