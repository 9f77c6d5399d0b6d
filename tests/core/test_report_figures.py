"""The tables of further figures."""

from __future__ import annotations

from typing import Any

from vbpipe.report import figures


def report() -> dict[str, Any]:
    def row(latency: dict[str, Any], metrics: dict[str, float]) -> dict[str, Any]:
        return {"latency": latency, "metrics": {name: {"value": value} for name, value in metrics.items()}}

    latency = {"samples": 700, "p50_ms": 2.0, "p90_ms": 3.0, "p99_ms": 4.0, "p99_below_ms": 5.0, "outliers": 0}
    bounded = {**latency, "samples": 300, "p99_ms": None}
    few = {**bounded, "samples": 10, "p99_below_ms": None}
    times = {"process_s": 0.2, "load_s": 0.5, "peak_rss_mib": 170.4, "throughput@b=4": 2000.0, "first_ms@b=4": 9.0}
    verdict = {
        "scenarios": ["b=4"],
        "work": {"b=4": {"flops": 8e9, "io_bytes": 1.0, "rows": 4}},
        "rows": {
            "eager": row({"b=4": latency}, times),
            "bounded": row({"b=4": bounded}, {**times, "switch_ms@b=4": 2.5}),
            "few": row({"b=4": few}, times),
            "dead": row({}, {}),
        },
    }
    rows = ["eager", "bounded", "few", "dead", "unbuilt"]
    return {"recipe": {"name": "m"}, "targets": {"cpu": {"rows": rows, "verdict": verdict}}}


def test_each_scenario_has_a_table_and_each_figure_its_place() -> None:
    (table,) = figures(report(), "cpu")
    cells = {row[0].text: dict(zip(table.columns, (cell.text for cell in row), strict=True)) for row in table.rows}
    assert table.title == "m on cpu at b=4"
    assert cells["eager"] == {
        "step": "eager", "p50 ms": "2.00", "p90 ms": "3.00", "p99 ms": "4.00", "calls": "700", "rows/s": "2000.0",
        "GFLOP/s": "4000.0", "process s": "0.20", "load s": "0.50", "first ms": "9.0", "switch ms": "",
        "peak MiB": "170",
    }  # fmt: skip
    assert cells["bounded"]["switch ms"] == "2.5"


def test_a_99th_percentile_is_a_bound_or_missing_where_calls_are_few() -> None:
    (table,) = figures(report(), "cpu")
    shown = {row[0].text: row[3].text for row in table.rows}
    assert shown == {"eager": "4.00", "bounded": "< 5.00", "few": "too few calls", "dead": ""}


def test_what_has_no_times_says_so_and_what_was_not_built_is_left_out() -> None:
    (table,) = figures(report(), "cpu")
    assert [row[0].text for row in table.rows] == ["eager", "bounded", "few", "dead"]
    assert table.rows[-1][1].text == "not measured"


def test_a_target_without_a_verdict_has_no_figures() -> None:
    nothing = report()
    nothing["targets"]["cpu"]["verdict"] = None
    assert list(figures(nothing, "cpu")) == []
