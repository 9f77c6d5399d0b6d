"""The further figures of a build, a table per scenario: percentiles, throughput, cold start, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vbpipe.report.table import Cell, Grid

COLUMNS = (
    "step", "p50 ms", "p90 ms", "p99 ms", "calls", "rows/s", "GFLOP/s", "process s", "load s", "first ms", "switch ms",
    "peak MiB",
)  # fmt: skip
"""`switch ms` is the first call after another shape; `process s` and `load s` come before any call."""


def figures(report: Mapping[str, Any], target: str) -> Iterator[Grid]:
    """Yield a table for each scenario of a target; nothing when nothing was judged.

    GFLOP/s is eager's arithmetic over the median call, for every row: what the model needs, not what an engine did.
    """
    facts = report["targets"][target]
    verdict = facts["verdict"]
    for scenario in verdict["scenarios"] if verdict else ():
        rows = [
            _row(name, verdict["rows"][name], scenario, verdict["work"][scenario])
            for name in facts["rows"]
            if name in verdict["rows"]
        ]
        yield Grid(f"{report['recipe']['name']} on {target} at {scenario}", COLUMNS, tuple(rows))


def _row(name: str, row: Mapping[str, Any], scenario: str, work: Mapping[str, float]) -> tuple[Cell, ...]:
    latency = row["latency"].get(scenario)
    if latency is None:
        return (Cell(name), Cell("not measured", "bad"), *(Cell("") for _ in COLUMNS[2:]))
    rate = work["flops"] / latency["p50_ms"] / 1e6
    shown = (
        f"{latency['p50_ms']:.2f}",
        f"{latency['p90_ms']:.2f}",
        _p99(latency),
        str(latency["samples"]),
        _figure(row, f"throughput@{scenario}", 1),
        f"{rate:.1f}" if rate else "",
        _figure(row, "process_s", 2),
        _figure(row, "load_s", 2),
        _figure(row, f"first_ms@{scenario}", 1),
        _figure(row, f"switch_ms@{scenario}", 1),
        _figure(row, "peak_rss_mib", 0),
    )
    return (Cell(name), *(Cell(text) for text in shown))


def _p99(latency: Mapping[str, Any]) -> str:
    """Return the percentile, or what bounds it, or how many calls it would take."""
    if latency["p99_ms"] is not None:
        return f"{latency['p99_ms']:.2f}"
    if latency["p99_below_ms"] is not None:
        return f"< {latency['p99_below_ms']:.2f}"
    return "too few calls"


def _figure(row: Mapping[str, Any], name: str, digits: int) -> str:
    figure = row["metrics"].get(name)
    return "" if figure is None else f"{figure['value']:.{digits}f}"
