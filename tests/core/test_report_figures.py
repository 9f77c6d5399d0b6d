"""The tables of further figures."""

from __future__ import annotations

from typing import Any

from vbpipe.report import figures
from vbpipe.report.figures import SHARES


def report() -> dict[str, Any]:
    def row(latency: dict[str, Any], metrics: dict[str, float], kind: str = "engine") -> dict[str, Any]:
        figures = {name: {"value": value} for name, value in metrics.items()}
        return {"latency": latency, "metrics": figures, "kind": kind, "size_bytes": 7_000_000}

    latency = {"samples": 700, "p50_ms": 2.0, "p90_ms": 3.0, "p99_ms": 4.0, "p99_below_ms": 5.0, "outliers": 0}
    bounded = {**latency, "samples": 300, "p99_ms": None}
    few = {**bounded, "samples": 10, "p99_below_ms": None}
    times = {"process_s": 0.2, "load_s": 0.5, "peak_rss_mib": 170.4, "throughput@b=4": 2000.0, "first_ms@b=4": 9.0}
    verdict = {
        "scenarios": ["b=4"],
        "work": {"b=4": {"flops": 8e9, "io_bytes": 1e6, "rows": 4}},
        "rows": {
            "eager": row({"b=4": latency}, times, "reference"),
            "bounded": row({"b=4": bounded}, {**times, "switch_ms@b=4": 2.5}),
            "few": row({"b=4": few}, times),
            "dead": row({}, {}),
        },
    }
    rows = ["eager", "bounded", "few", "dead", "unbuilt"]
    return {"recipe": {"name": "m"}, "targets": {"cpu": {"rows": rows, "verdict": verdict}}}


def with_ceilings() -> dict[str, Any]:
    found = report()
    rates = {"fp32": 5000.0, "int8_u8s8": 16000.0, "int8_s8s8": 100.0}
    found["targets"]["cpu"]["ceilings"] = {
        "threads": 1, "bandwidth_gb_s": 8.0, "rates": rates, "taken": "2026-01-02T03:04:05+00:00"
    }  # fmt: skip
    return found


def cells_of(found: dict[str, Any]) -> dict[str, dict[str, str]]:
    (table,) = figures(found, "cpu")
    return {row[0].text: dict(zip(table.columns, (cell.text for cell in row), strict=True)) for row in table.rows}


def test_each_scenario_has_a_table_and_each_figure_its_place() -> None:
    (table,) = figures(report(), "cpu")
    cells = cells_of(report())
    assert table.title.startswith("m on cpu at b=4")
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


def test_each_row_has_its_shares_of_the_ceilings() -> None:
    cells = cells_of(with_ceilings())
    names = ("GFLOP/s", "of fp32 peak", "of int8 peak", "of bandwidth")
    # 8 MB in 2 ms are half of 8 GB/s; eager's artifact holds no weights.
    assert [cells["bounded"][name] for name in names] == ["4000.0", "80.0%", "25.0%", "50.0%"]
    assert [cells["eager"][name] for name in names] == ["4000.0", "80.0%", "25.0%", ""]
    assert [cells["dead"][name] for name in names] == ["", "", "", ""]
    (table,) = figures(with_ceilings(), "cpu")
    assert "ceilings on 2026-01-02: memory 8.0 GB/s, fp32 5000 GFLOP/s" in table.title


def test_a_model_without_counted_arithmetic_has_a_share_of_the_bandwidth_only() -> None:
    found = with_ceilings()
    found["targets"]["cpu"]["verdict"]["work"]["b=4"]["flops"] = 0.0
    assert [cells_of(found)["few"][name] for name in SHARES] == ["", "", "50.0%"]


def test_without_ceilings_there_are_no_shares_and_the_first_table_says_why() -> None:
    older = report()
    older["targets"]["cpu"]["verdict"]["scenarios"].append("b=8")
    older["targets"]["cpu"]["verdict"]["work"]["b=8"] = {"flops": 1.0, "io_bytes": 1.0, "rows": 8}
    first, second = figures(older, "cpu")
    assert not set(SHARES) & set(first.columns)
    assert "vbpipe doctor --measure" in first.title
    assert second.title == "m on cpu at b=8"
    older["targets"]["cpu"] |= {"ceilings": None, "ceilings_missing": "backend 'b' can't."}
    assert next(figures(older, "cpu")).title == "m on cpu at b=4; backend 'b' can't"
