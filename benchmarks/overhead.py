"""Ask what the harness itself costs: inside a timed call, and around a block.

python benchmarks/overhead.py
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from vbpipe import samples
from vbpipe.measure import Candidate, Scenario, Settings, messages, probe
from vbpipe.measure.group import opening
from vbpipe.measure.process import Ask, Failure, Worker, close_all, exchange
from vbpipe.measure.worker import time_calls

BLOCKS, CALLS = 300, 200


def main() -> None:
    """Print both costs in microseconds, as medians and 99th percentiles."""
    calls = sorted(ns / 1e3 for _ in range(BLOCKS) for ns in time_calls(dict, [{}], CALLS).ns)
    blocks = sorted(_block_us())
    print(f"{'what':<52}{'median us':>10}{'p99 us':>10}")
    for what, values in (
        ("in a timed call: the clock, and calling an empty engine", calls),
        ("around a block", blocks),
    ):
        print(f"{what:<52}{median(values):>10.2f}{values[int(0.99 * len(values))]:>10.2f}")


def _block_us() -> list[float]:
    """Return the time of blocks of one call as the measuring process sees them, less the call itself."""
    with TemporaryDirectory(prefix="vbpipe-overhead-") as name:
        path = Path(name) / "inputs.safetensors"
        samples.save_arrays(path, probe.inputs())
        settings, scenario = Settings(), Scenario("probe", path)
        worker = Worker(Path(name) / "log", 1)
        try:
            _ask(worker, opening(Candidate("probe", probe.BACKEND, {}, "", Path()), (scenario,), {}, settings))
            found = []
            for _ in range(BLOCKS):
                begin = time.perf_counter_ns()
                reply = _ask(worker, messages.Time("probe", 0, 1, 0.0))
                assert isinstance(reply, messages.Timed)
                found.append((time.perf_counter_ns() - begin - sum(reply.ns)) / 1e3)
        finally:
            close_all([worker], at_once=False)
    return found


def _ask(worker: Worker, request: messages.Request) -> messages.Reply:
    reply = exchange([Ask(worker, request, 30.0)], 1)[worker]
    if isinstance(reply, Failure):
        raise SystemExit(f"the probe can't be timed: {reply.message}")
    return reply


if __name__ == "__main__":
    main()
