"""Gates, fallback and the choice of what is shipped, on figures made up for the purpose."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vbpipe.decide import (
    Compare,
    Figure,
    GateResult,
    Row,
    describe,
    effective_gates,
    judge_row,
    judge_variant,
    overall,
    ship,
    worst,
)
from vbpipe.recipe.model import Gate

SPEED = Gate(metric="speedup", min=1.0)
COSINE = Gate(metric="cosine", min=0.99)
S = "batch=1"


def row(name: str, low: float, high: float, *, cosine: float = 1.0, **metrics: float) -> Row:
    figures = {key: Figure(value) for key, value in {"cosine": cosine, **metrics}.items()}
    return Row(name, {S: Figure(math.sqrt(low * high), low, high)}, figures)


def compare(*rows: Row, noise: float = 0.0, **more: object) -> Compare:
    ratios = {(r.name, "eager"): r.speedups for r in rows}
    return Compare(ratios=ratios, previous={}, finals={}, noise={S: noise})


def judged(one: Row, *gates: Gate, noise: float = 0.0) -> tuple[GateResult, ...]:
    eager = Row("eager", {}, {"pearson": Figure(0.65)}, shippable=False)
    return judge_row(one, {one.name: one, "eager": eager}, gates, compare(one, noise=noise))


@pytest.mark.parametrize(
    ("low", "high", "noise", "outcome"),
    [
        (1.2, 1.4, 0.0, "pass"),
        (0.5, 0.6, 0.0, "fail"),
        (0.9, 1.1, 0.0, "inconclusive"),
        (1.01, 1.03, 0.05, "inconclusive"),
        (0.97, 0.99, 0.05, "inconclusive"),
        (0.0, math.inf, 0.0, "inconclusive"),
        (math.nan, math.nan, 0.0, "inconclusive"),
        (1.2, 1.4, math.inf, "inconclusive"),
    ],
)
def test_a_speedup_gate_reads_the_end_of_the_interval_that_counts(
    low: float, high: float, noise: float, outcome: str
) -> None:
    value = Row("r", {S: Figure(1.0, low, high)}, {"cosine": Figure(1.0)})
    assert worst(judged(value, SPEED, COSINE, noise=noise)) == outcome


def test_a_scenario_in_which_a_row_is_slower_refuses_it_though_another_is_faster() -> None:
    one = Row("r", {"small": Figure(3, 2.9, 3.1), "large": Figure(0.8, 0.79, 0.81)}, {"cosine": Figure(1.0)})
    found = judge_row(
        one, {"r": one}, (SPEED,), Compare({("r", "eager"): one.speedups}, {}, {}, {"small": 0, "large": 0})
    )
    assert worst(found) == "fail"
    only_small = Gate(metric="speedup", min=1.0, scenario="small")
    found = judge_row(one, {"r": one}, (only_small,), Compare({("r", "eager"): one.speedups}, {}, {}, {"small": 0}))
    assert worst(found) == "pass"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.98])
def test_a_metric_that_is_no_number_or_too_low_never_passes(value: float) -> None:
    assert worst(judged(row("r", 2, 3, cosine=value), COSINE)) == "fail"


def test_a_metric_that_nobody_measured_fails_and_the_reason_names_what_there_is() -> None:
    found = judged(row("r", 2, 3), Gate(metric="f1", min=0.5))
    assert worst(found) == "fail"
    assert "measured: cosine" in next(r.reason for r in found if r.outcome == "fail")


@pytest.mark.parametrize(("pearson", "outcome"), [(0.66, "pass"), (0.64, "pass"), (0.60, "fail"), (math.nan, "fail")])
def test_a_drop_is_taken_against_eager(pearson: float, outcome: str) -> None:
    gate = Gate(metric="pearson", max_drop=0.02)
    assert worst(judged(row("r", 2, 3, pearson=pearson), gate)) == outcome


def test_a_recipe_without_gates_still_refuses_what_is_slower_or_wrong() -> None:
    assert [gate.metric for gate, implied in effective_gates(()) if implied] == ["speedup", "cosine"]
    assert worst(judged(row("r", 0.5, 0.6))) == "fail"
    assert worst(judged(row("r", 2, 3, cosine=0.5))) == "fail"
    assert worst(judged(row("r", 2, 3))) == "pass"


def test_a_gate_on_accuracy_replaces_the_implied_one() -> None:
    asked = Gate(metric="top1_agreement", min=0.9)
    assert [g.metric for g, _ in effective_gates((asked,))] == ["top1_agreement", "speedup"]


def test_a_variant_falls_back_to_its_last_row_that_passes() -> None:
    rows = {"onnx": row("onnx", 1.1, 1.2), "fuse": row("fuse", 2, 3), "engine": row("engine", 0.5, 0.6)}
    found = {name: judged(one, SPEED) for name, one in rows.items()}
    verdict = judge_variant("v", list(rows), found, rows, "engine")
    assert (verdict.outcome, verdict.chosen) == ("fail", "fuse")
    assert verdict.reasons[0].startswith("engine: speedup over eager >= 1: 0.548x [0.500, 0.600]")


def test_a_variant_whose_last_step_was_not_built_has_failed() -> None:
    rows = {"onnx": row("onnx", 1.1, 1.2)}
    verdict = judge_variant("v", ["onnx"], {"onnx": judged(rows["onnx"], SPEED)}, rows, "engine")
    assert (verdict.outcome, verdict.chosen, verdict.reasons) == ("fail", "onnx", ("engine was not built.",))


def test_eager_is_never_packaged() -> None:
    eager = Row("eager", {}, {}, shippable=False)
    verdict = judge_variant("v", ["eager"], {"eager": ()}, {"eager": eager}, "engine")
    assert verdict.chosen is None
    assert ship([verdict], {"eager": eager}) is None


def test_the_fastest_variant_that_passes_is_shipped() -> None:
    rows = {"a": row("a", 1.9, 2.1), "b": row("b", 2.9, 3.1), "c": row("c", 9, 10, cosine=0.5)}
    found = {name: judged(one, SPEED, COSINE) for name, one in rows.items()}
    shipped = ship([judge_variant(n, [n], found, rows, n) for n in rows], rows)
    assert shipped is not None
    assert shipped.chosen == "b"


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=6))
def test_the_overall_speedup_lies_between_the_slowest_and_the_fastest_scenario(values: list[float]) -> None:
    one = Row("r", {str(i): Figure(v) for i, v in enumerate(values)}, {})
    assert min(values) * 0.999 <= overall(one) <= max(values) * 1.001


def test_gates_are_described_as_people_write_them() -> None:
    assert (
        describe(Gate(metric="speedup", over="previous", min=1.05, scenario=S))
        == "speedup over previous >= 1.05 at batch=1"
    )
    assert describe(Gate(metric="pearson", max_drop=0.02)) == "pearson over eager drop <= 0.02"
    assert describe(COSINE) == "cosine >= 0.99"
