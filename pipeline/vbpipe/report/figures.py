"""The further figures of a build, a table per scenario: percentiles, throughput, cold start, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vbpipe.measure.ceilings import COMMAND, Ceilings
from vbpipe.report.table import Cell, Grid

COLUMNS = (
    "step", "p50 ms", "p90 ms", "p99 ms", "calls", "rows/s", "GFLOP/s", "of fp32 peak", "of int8 peak", "of bandwidth",
    "process s", "load s", "first ms", "switch ms", "peak MiB",
)  # fmt: skip
"""`switch ms` is the first call after another shape; `process s` and `load s` come before any call."""

SHARES = COLUMNS[7:10]
"""The columns that are left out where this host's ceilings are not known."""


def figures(report: Mapping[str, Any], target: str) -> Iterator[Grid]:
    """Yield a table for each scenario of a target; nothing when nothing was judged.

    GFLOP/s is eager's arithmetic over the median call, for every row: what the model needs, not what an engine did.
    `of fp32 peak` and `of int8 peak` are shares of the best matrix products that were measured on this host with as
    many threads, for every row: a quantized one may well pass 100 % of the first. `of bandwidth` is the artifact's
    size, as if all weights were read once, plus inputs and outputs, over the median call. What lies between steps is
    not counted, so more may move; less does where weights stay in a cache, or tables are read in part. It is empty
    for eager, whose artifact holds no weights.

    The first table's title has the ceilings, or why there are none.
    """
    facts = report["targets"][target]
    verdict = facts["verdict"]
    ceilings = Ceilings(**facts["ceilings"]) if facts.get("ceilings") else None
    columns = tuple(name for name in COLUMNS if ceilings is not None or name not in SHARES)
    note = f"; {_note(facts, ceilings)}"
    for scenario in verdict["scenarios"] if verdict and not verdict.get("pending") else ():
        rows = []
        for name in facts["rows"]:
            if name in verdict["rows"]:
                shown = _row(verdict["rows"][name], scenario, verdict["work"][scenario], ceilings)
                rows.append((Cell(name), *(shown.get(column, Cell("")) for column in columns[1:])))
        yield Grid(f"{report['recipe']['name']} on {target} at {scenario}{note}", columns, tuple(rows))
        note = ""


def _note(facts: Mapping[str, Any], ceilings: Ceilings | None) -> str:
    if ceilings is not None:
        return f"ceilings on {ceilings.taken[:10]}: {ceilings.describe()}"
    missing = facts.get("ceilings_missing") or f"{COMMAND}, then another build, adds shares of this host's ceilings"
    return str(missing).rstrip(".")


def _row(
    row: Mapping[str, Any], scenario: str, work: Mapping[str, float], ceilings: Ceilings | None
) -> Mapping[str, Cell]:
    latency = row["latency"].get(scenario)
    if latency is None:
        return {"p50 ms": Cell("not measured", "bad")}
    rate = work["flops"] / latency["p50_ms"] / 1e6
    shown = {
        "p50 ms": f"{latency['p50_ms']:.2f}",
        "p90 ms": f"{latency['p90_ms']:.2f}",
        "p99 ms": _p99(latency),
        "calls": str(latency["samples"]),
        "rows/s": _figure(row, f"throughput@{scenario}", 1),
        "GFLOP/s": f"{rate:.1f}" if rate else "",
        **_shares(row, latency["p50_ms"], work, ceilings),
        "process s": _figure(row, "process_s", 2),
        "load s": _figure(row, "load_s", 2),
        "first ms": _figure(row, f"first_ms@{scenario}", 1),
        "switch ms": _figure(row, f"switch_ms@{scenario}", 1),
        "peak MiB": _figure(row, "peak_rss_mib", 0),
    }
    return {column: Cell(text) for column, text in shown.items()}


def _p99(latency: Mapping[str, Any]) -> str:
    """Return the percentile, or what bounds it, or how many calls it would take."""
    if latency["p99_ms"] is not None:
        return f"{latency['p99_ms']:.2f}"
    if latency["p99_below_ms"] is not None:
        return f"< {latency['p99_below_ms']:.2f}"
    return "too few calls"


def _shares(
    row: Mapping[str, Any], call_ms: float, work: Mapping[str, float], ceilings: Ceilings | None
) -> Mapping[str, str]:
    if ceilings is None:
        return {}
    moved = None if row["kind"] == "reference" else row["size_bytes"] + work["io_bytes"]
    found = ceilings.shares(work["flops"], moved, call_ms)
    values = (found.fp32, found.int8, found.bandwidth)
    return {name: "" if value is None else f"{value:.1%}" for name, value in zip(SHARES, values, strict=True)}


def _figure(row: Mapping[str, Any], name: str, digits: int) -> str:
    figure = row["metrics"].get(name)
    return "" if figure is None else f"{figure['value']:.{digits}f}"
