"""Gates, fallback and the choice of what is shipped, on figures made up for the purpose."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vbpipe.decide import (
    Compare,
    Figure,
    GateResult,
    Row,
    Stored,
    describe,
    effective_gates,
    judge_row,
    judge_variant,
    judged_together,
    overall,
    quotient,
    ship,
    worst,
)
from vbpipe.recipe.model import Gate, StoredReport

SPEED = Gate(metric="speedup", min=1.0)
COSINE = Gate(metric="cosine", min=0.99)
S = "batch=1"


def row(name: str, low: float, high: float, *, cosine: float = 1.0, **metrics: float) -> Row:
    figures = {key: Figure(value) for key, value in {"cosine": cosine, "sqnr_db": 20.0, **metrics}.items()}
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
    centre = math.sqrt(low * high) if 0 < low <= high < math.inf else 1.0
    value = Row("r", {S: Figure(centre, low, high)}, {"cosine": Figure(1.0), "sqnr_db": Figure(300.0)})
    assert worst(judged(value, SPEED, COSINE, noise=noise)) == outcome


@pytest.mark.parametrize(("noise", "outcome"), [(0.039, "pass"), (0.041, "inconclusive")])
def test_what_eager_differs_from_itself_adds_to_an_interval_as_squares(noise: float, outcome: str) -> None:
    figure = Figure(math.exp(0.05), math.exp(0.02), math.exp(0.08))
    value = Row("r", {S: figure}, {"cosine": Figure(1.0), "sqnr_db": Figure(300.0)})
    assert worst(judged(value, SPEED, COSINE, noise=math.expm1(noise))) == outcome


def test_a_row_without_times_is_refused_with_the_reason_why_it_has_none() -> None:
    value = Row("r", {}, {"cosine": Figure(1.0), "sqnr_db": Figure(300.0)}, not_measured="hung: no answer for 3 s.")
    (found,) = (result for result in judged(value, SPEED, COSINE) if result.outcome != "pass")
    assert found.outcome == "fail"
    assert found.reason.endswith("no ratio was measured: hung: no answer for 3 s.")


def test_a_row_that_another_host_must_measure_is_pending_and_never_passes() -> None:
    one = Row("engine", {}, {"cosine": Figure(0.99)}, not_measured="pending: needs a GPU.", pending="a GPU")
    speed, p50, pearson = (Gate(metric=name, min=0.5) for name in ("speedup", "p50_ms", "pearson"))
    found = judge_row(one, {"engine": one}, (speed, p50, pearson), compare())
    by_gate = {result.gate: result.outcome for result in found if not result.implied}
    assert by_gate == {"speedup over eager >= 0.5": "pending", "p50_ms >= 0.5": "pending", "pearson >= 0.5": "pending"}
    assert worst(found) == "pending"
    assert "needs a GPU" in found[0].reason


def test_what_is_known_of_a_pending_row_can_still_refuse_it() -> None:
    one = Row("engine", {}, {"cosine": Figure(0.5)}, not_measured="pending: needs a GPU.", pending="a GPU")
    found = judge_row(one, {"engine": one}, (Gate(metric="cosine", min=0.9),), compare())
    assert worst(found) == "fail"


def test_a_scenario_in_which_a_row_is_slower_refuses_it_though_another_is_faster() -> None:
    figures = {"cosine": Figure(1.0), "sqnr_db": Figure(20.0)}
    one = Row("r", {"small": Figure(3, 2.9, 3.1), "large": Figure(0.8, 0.79, 0.81)}, figures)
    found = judge_row(
        one, {"r": one}, (SPEED,), Compare({("r", "eager"): one.speedups}, {}, {}, {"small": 0, "large": 0})
    )
    assert worst(found) == "fail"
    only_small = Gate(metric="speedup", min=1.0, scenario="small")
    both = Compare({("r", "eager"): one.speedups}, {}, {}, {"small": 0, "large": 0})
    found = judge_row(one, {"r": one}, (only_small,), both)
    assert [(r.outcome, r.implied) for r in found if "speedup" in r.gate] == [
        ("pass", False), ("pass", True), ("fail", True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "gate",
    [
        Gate(metric="speedup", over="previous", min=1.0),
        Gate(metric="speedup", min=1.0, scenario=S),
        Gate(metric="speedup", max=9.0),
    ],
)
def test_a_gate_on_another_speedup_does_not_cover_the_one_over_eager(gate: Gate) -> None:
    assert "speedup over eager >= 1" in [describe(g) for g, implied in effective_gates((gate,)) if implied]


@pytest.mark.parametrize(("metric", "implied"), [("size_mb", True), ("load_s", True), ("cosine_min", False)])
def test_only_a_bound_on_closeness_covers_the_implied_one(metric: str, implied: bool) -> None:
    found = effective_gates((Gate(metric=metric, max=1.0),))
    assert ("cosine" in [gate.metric for gate, is_implied in found if is_implied]) is implied


def test_outputs_of_another_size_are_refused_though_their_cosine_is_one() -> None:
    import numpy as np

    from vbpipe.fidelity import compare as closeness

    far = closeness([{"y": np.array([[100.0]], "f")}], [{"y": np.array([[1.0]], "f")}])
    assert far.cosine == 1.0
    found = judged(row("r", 2, 3, cosine=far.cosine, sqnr_db=far.sqnr_db), COSINE)
    assert [r.gate for r in found if r.outcome == "fail"] == ["sqnr_db >= 6"]


@pytest.mark.parametrize(
    ("figure", "gate", "outcome"),
    [
        (Figure(0.90, 0.80, 0.97), Gate(metric="accuracy", min=0.85), "inconclusive"),
        (Figure(0.90, 0.88, 0.97), Gate(metric="accuracy", min=0.85), "pass"),
        (Figure(0.70, 0.60, 0.80), Gate(metric="accuracy", min=0.85), "fail"),
        (Figure(0.90, 0.80, 0.97), Gate(metric="accuracy", max_drop=0.05), "inconclusive"),
        (Figure(0.90, 0.89, 0.91), Gate(metric="accuracy", max_drop=0.05), "pass"),
        (Figure(0.70, 0.69, 0.71), Gate(metric="accuracy", max_drop=0.05), "fail"),
    ],
)
def test_a_metric_with_an_interval_is_judged_by_the_end_that_counts(figure: Figure, gate: Gate, outcome: str) -> None:
    one = Row("r", {S: Figure(2, 1.9, 2.1)}, {"accuracy": figure, "cosine": Figure(1.0), "sqnr_db": Figure(20.0)})
    eager = Row("eager", {}, {"accuracy": Figure(0.91, 0.90, 0.92)}, shippable=False)
    assert worst(judge_row(one, {"r": one, "eager": eager}, (gate,), compare(one))) == outcome


def test_equal_outputs_have_no_drop_however_wide_the_interval_is() -> None:
    wide = Figure(0.65, 0.5, 0.8)
    one = Row("r", {S: Figure(2, 1.9, 2.1)}, {"pearson": wide, "cosine": Figure(1.0), "sqnr_db": Figure(140.0)})
    eager = Row("eager", {}, {"pearson": wide}, shippable=False)
    gate = Gate(metric="pearson", max_drop=0.01)
    assert worst(judge_row(one, {"r": one, "eager": eager}, (gate,), compare(one))) == "pass"


def test_a_figure_that_one_scenario_lacks_can_not_be_told() -> None:
    figures = {"cosine": Figure(1.0), "sqnr_db": Figure(20.0), "p99_ms@a": Figure(1.0)}
    one = Row("r", {"a": Figure(2, 1.9, 2.1), "b": Figure(2, 1.9, 2.1)}, figures)
    both = Compare({("r", "eager"): one.speedups}, {}, {}, {"a": 0, "b": 0})
    found = judge_row(one, {"r": one}, (Gate(metric="p99_ms", max=2.0),), both)
    assert [r.outcome for r in found if "p99" in r.gate] == ["pass", "inconclusive"]


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
    assert [gate.metric for gate, implied in effective_gates(()) if implied] == ["speedup", "cosine", "sqnr_db"]
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


LAST = StoredReport(report="last.json", row="old/engine")


def against(stored: Stored, *, comparisons: int = 1, **speedups: Figure) -> Compare:
    ratios = {(name, "eager"): {S: figure} for name, figure in speedups.items()}
    return Compare(ratios, {}, {}, {S: 0.0}, stored={"last.json": stored}, comparisons=comparisons)


def stored(figure: Figure, differs: str = "", noise: float = 0.0, **metrics: Figure) -> Stored:
    return Stored({"old/engine": Row("old/engine", {S: figure}, metrics)}, {S: noise}, differs)


def test_the_quotient_of_two_ratios_has_the_root_of_both_squares_as_its_interval() -> None:
    found = quotient(
        Figure(2.0, 2.0 / math.exp(0.03), 2.0 * math.exp(0.03)), Figure(1.6, 1.6 / math.exp(0.04), 1.6 * math.exp(0.04))
    )
    assert found.value == pytest.approx(1.25)
    assert found.low == pytest.approx(1.25 / math.exp(0.05))
    assert found.high == pytest.approx(1.25 * math.exp(0.05))


def test_the_quotient_of_intervals_that_lean_takes_the_ends_that_count() -> None:
    found = quotient(Figure(1.0, math.exp(-0.03), math.exp(0.3)), Figure(1.0, math.exp(-0.4), math.exp(0.04)))
    assert found.low == pytest.approx(math.exp(-0.05))
    assert found.high == pytest.approx(math.exp(0.5))


@pytest.mark.parametrize("unbounded", [Figure(1.0, 0.0, math.inf), Figure(1.0), Figure(1.0, 0.5, math.inf)])
def test_a_ratio_without_an_interval_leaves_the_quotient_without_one(unbounded: Figure) -> None:
    for found in (quotient(unbounded, Figure(2.0, 1.9, 2.1)), quotient(Figure(2.0, 1.9, 2.1), unbounded)):
        assert (found.low, found.high) == (0.0, math.inf)


@pytest.mark.parametrize(
    ("here", "there", "outcome"),
    [
        (Figure(2.0, 1.98, 2.02), Figure(1.5, 1.48, 1.52), "pass"),
        (Figure(1.5, 1.48, 1.52), Figure(2.0, 1.98, 2.02), "fail"),
        (Figure(2.0, 1.8, 2.2), Figure(2.0, 1.8, 2.2), "inconclusive"),
        (Figure(2.0, 1.98, 2.02), Figure(2.0, 0.0, math.inf), "inconclusive"),
    ],
)
def test_a_speedup_is_compared_with_the_stored_one(here: Figure, there: Figure, outcome: str) -> None:
    gate = Gate(metric="speedup", over=LAST, min=1.0)
    (found, *_) = judge_row(row("r", 2, 2.1), {}, (gate,), against(stored(there), r=here))
    assert found.outcome == outcome
    assert found.gate == "speedup over old/engine in last.json >= 1"


def test_what_eager_differed_from_itself_counts_in_both_runs() -> None:
    gate = Gate(metric="speedup", over=LAST, min=1.0)
    here, there = Figure(1.04, 1.04, 1.04), Figure(1.0, 1.0, 1.0)
    quiet, noisy = stored(there, noise=0.03), stored(there, noise=math.inf)
    judge = [judge_row(row("r", 2, 2.1), {}, (gate,), against(there_, r=here))[0].outcome for there_ in (quiet, noisy)]
    assert judge == ["pass", "inconclusive"]
    both = Compare({("r", "eager"): {S: here}}, {}, {}, {S: 0.03}, stored={"last.json": quiet})
    assert judge_row(row("r", 2, 2.1), {}, (gate,), both)[0].outcome == "inconclusive"  # 4 % against 4.3 %


@pytest.mark.parametrize("here", [Figure(9.0, 8.9, 9.1), Figure(0.1, 0.09, 0.11)])
def test_speeds_of_unequal_machines_are_never_passed_nor_failed(here: Figure) -> None:
    unequal = stored(Figure(1.0, 0.99, 1.01), "cores: 2 of 2 here, 8 of 8 there", throughput=Figure(10.0))
    one = row("r", 2, 2.1)
    gates = (Gate(metric="speedup", over=LAST, min=1.0),)
    (found, *_) = judge_row(one, {"r": one}, gates, against(unequal, r=here))
    assert found.outcome == "inconclusive"
    assert "cores: 2 of 2 here, 8 of 8 there" in found.reason


@pytest.mark.parametrize(
    ("metric", "over", "said"),
    [
        ("speedup", "previous", "write `min: 0.97`"),
        ("speedup", {"report": "last.json"}, "write `min: 0.97`"),
        ("p50_ms", "eager", "better low: use max"),
        ("size_mb", {"report": "last.json"}, "better low: use max"),
        ("max_abs", "eager", "better low: use max"),
        ("throughput", {"report": "last.json"}, "use speedup"),
    ],
)
def test_a_drop_that_would_bound_nothing_or_the_wrong_side_is_refused(metric: str, over: object, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Gate.model_validate({"metric": metric, "over": over, "max_drop": 0.05})
    assert Gate.model_validate({"metric": "throughput", "max_drop": 5.0}).max_drop == 5.0


def test_an_interval_without_bounds_and_a_missing_control_have_reasons_of_their_own() -> None:
    one = row("r", 1.5, 1.6)
    (no_control, *_) = judged(one, SPEED, noise=math.inf)
    assert "without a second worker of eager" in no_control.reason
    single = Row("r", {S: Figure(1.5, 0.0, math.inf)}, one.metrics)
    (alone, *_) = judged(single, SPEED, noise=0.0)
    assert "from a single group" in alone.reason
    assert no_control.outcome == alone.outcome == "inconclusive"


@pytest.mark.parametrize("differs", ["", "cores: 2 of 2 here, 8 of 8 there"])
@pytest.mark.parametrize(("value", "outcome"), [(0.89, "pass"), (0.85, "fail")])
def test_quality_is_compared_whatever_the_machine(differs: str, value: float, outcome: str) -> None:
    earlier = stored(Figure(1.0, 0.99, 1.01), differs, accuracy=Figure(0.9))
    one = row("r", 2, 2.1, accuracy=value)
    gate = Gate(metric="accuracy", over=LAST, max_drop=0.02)
    (found, *_) = judge_row(one, {"r": one}, (gate,), against(earlier, r=Figure(2.0, 1.9, 2.1)))
    assert (found.outcome, found.gate) == (outcome, "accuracy over old/engine in last.json drop <= 0.02")


def test_equal_outputs_do_not_excuse_a_drop_from_a_stored_report() -> None:
    earlier = stored(Figure(1.0, 0.99, 1.01), accuracy=Figure(0.9, 0.8, 1.0))
    one = row("r", 2, 2.1, accuracy=0.9, sqnr_db=140.0)
    gate = Gate(metric="accuracy", over=LAST, max_drop=0.02)
    (found, *_) = judge_row(one, {"r": one}, (gate,), against(earlier, r=Figure(2.0, 1.9, 2.1)))
    assert found.outcome == "inconclusive"


def test_a_stored_report_without_the_step_or_figure_fails_the_gate() -> None:
    same = StoredReport(report="last.json")
    one = row("r", 2, 2.1, accuracy=0.9)
    gates = (Gate(metric="speedup", over=same, min=1.0), Gate(metric="accuracy", over=LAST, max_drop=0.02))
    found = judge_row(one, {"r": one}, gates, against(stored(Figure(1.0, 0.9, 1.1)), r=Figure(2.0, 1.9, 2.1)))[:2]
    assert [result.outcome for result in found] == ["fail", "fail"]
    assert (
        found[0].reason == "speedup over the same step in last.json >= 1: the report has no speed-up of r at batch=1."
    )


def test_every_ratio_that_gates_judge_counts_once() -> None:
    names = ("eager", "a/onnx", "a/engine", "b/engine")
    two = Compare({}, {"a/engine": "a/onnx", "a/onnx": "eager"}, {"a": "a/engine"}, {"s": 0.0, "t": 0.0})
    # the implied gate: three rows over eager in two scenarios
    assert len(judged_together(names, (), two)) == 6
    # the same ratios with another bound are no more of them
    assert len(judged_together(names, (SPEED, Gate(metric="speedup", max=9.0)), two)) == 6
    # a/engine over the step before it; a/onnx's is eager, which counts already, and b/engine has none
    assert len(judged_together(names, (SPEED, Gate(metric="speedup", over="previous", min=1.0)), two)) == 8
    # a's last step: of a/onnx and b/engine, in one scenario
    assert len(judged_together(names, (SPEED, Gate(metric="speedup", over="a", min=1.0, scenario="t")), two)) == 8
    # a stored report: of every row, in one scenario
    stored_gate = Gate(metric="speedup", over=StoredReport(report="x"), min=1.0, scenario="s")
    assert len(judged_together(names, (SPEED, stored_gate), two)) == 9
    assert len(judged_together(names, (Gate(metric="accuracy", min=0.5),), two)) == 6


def test_the_interval_that_a_gate_judges_says_its_confidence() -> None:
    one = row("r", 1.01, 1.113)
    eight = Compare({("r", "eager"): one.speedups}, {}, {}, {S: 0.0}, comparisons=8)
    assert eight.level == pytest.approx(0.99375)
    (found, *_) = judge_row(one, {"r": one}, (SPEED, COSINE), eight)
    assert "1.060x [1.010, 1.113] (99.4 %, one of 8 judged together) at batch=1" in found.reason
    many = Compare({("r", "eager"): one.speedups}, {}, {}, {S: 0.0}, comparisons=300)
    assert "(99.98 %, one of 300" in judge_row(one, {"r": one}, (SPEED, COSINE), many)[0].reason
    alone = Compare({("r", "eager"): one.speedups}, {}, {}, {S: 0.0})
    assert "judged together" not in judge_row(one, {"r": one}, (SPEED, COSINE), alone)[0].reason
