"""Decide which rows pass the gates, what each variant falls back to, and what is shipped: pure functions on figures."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vbpipe.measure.statistics import widen
from vbpipe.recipe.model import Gate, StoredReport

Outcome = Literal["pass", "fail", "inconclusive", "pending"]
"""pending: it takes another host to tell."""
BASELINE = "eager"
"""The row that everything is compared with."""
FIDELITY = frozenset({"cosine", "cosine_min", "sqnr_db", "max_abs", "max_relative", "top1_agreement"})
TIMES = frozenset(
    {"p50_ms", "p90_ms", "p99_ms", "throughput", "first_ms", "switch_ms", "process_s", "load_s", "peak_rss_mib"}
)
MEASURED = FIDELITY | TIMES | {"speedup", "size_mb"}
"""Figures that every build measures; others come from `data.evaluation`, and may not take these names."""
SIZED = frozenset({"sqnr_db", "max_abs", "max_relative", "top1_agreement"})
"""Figures that see a wrong scale; cosine does not."""
IMPLIED = (
    Gate(metric="speedup", min=1.0),
    Gate(metric="cosine", min=0.99),
    Gate(metric="sqnr_db", min=6.0),
)
"""What holds where a recipe bounds nothing in its place: nothing slower than eager in any scenario, nothing that
points elsewhere than its outputs, nothing of another size (at 6 dB the error has a quarter of the power)."""
LEVEL = 0.95
"""Confidence that every interval of a report has, and that those which gates judge have together."""
EXACT_DB = 100.0
"""From here on outputs are eager's own, up to rounding, and so are the metrics made of them."""


@dataclass(frozen=True)
class Figure:
    """A measured figure; `low` and `high` are its 95 % interval where it has one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Row:
    """Everything measured of one step. `speedups` is scenario to ratio over eager (above 1 is faster).

    `not_measured` says why there are no times; it is empty where there are. `pending` is what it takes to measure it,
    where this host lacks that: what is not known of such a row is still to come.
    """

    name: str
    speedups: Mapping[str, Figure]
    metrics: Mapping[str, Figure]
    shippable: bool = True
    not_measured: str = ""
    pending: str = ""


@dataclass(frozen=True)
class Stored:
    """What a stored report says of the target that is judged."""

    rows: Mapping[str, Row]
    noise: Mapping[str, float]
    differs: str
    """How the machine that it was measured on differs from this one; empty when it doesn't."""


@dataclass(frozen=True)
class GateResult:
    """How one gate judged one row, with the sentence that a report prints."""

    gate: str
    outcome: Outcome
    reason: str
    implied: bool = False


@dataclass(frozen=True)
class VariantVerdict:
    """`chosen` is the last row of the chain that passes every gate; None means that eager stays."""

    variant: str
    last: str | None
    chosen: str | None
    outcome: Outcome
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Compare:
    """What `Gate.over` needs: ratios between any two rows, each row's predecessor, and stored reports."""

    ratios: Mapping[tuple[str, str], Mapping[str, Figure]]
    """(row, over) to scenario to ratio, its interval with confidence `level`."""
    previous: Mapping[str, str]
    finals: Mapping[str, str]
    """Variant to its last row."""
    noise: Mapping[str, float]
    """Scenario to the difference that eager showed from itself in the same run: 0.01 is 1 %."""
    stored: Mapping[str, Stored] = field(default_factory=dict)
    """Path of a stored report, as its gate gives it, to what it says; intervals with confidence `level` as well."""
    comparisons: int = 1
    """How many ratios the gates judge together."""

    @property
    def level(self) -> float:
        """Return the confidence of each interval: LEVEL for all of them together (Bonferroni)."""
        return 1 - (1 - LEVEL) / self.comparisons


def effective_gates(gates: Sequence[Gate]) -> tuple[tuple[Gate, bool], ...]:
    """Return the recipe's gates, and behind them (marked True) the implied ones that no gate of the recipe covers.

    Only a bound on the very thing covers one: a speed-up over another step, or in one scenario, says nothing of eager.
    """
    bounded = {gate.metric for gate in gates if (gate.min is not None or gate.max is not None) and not gate.scenario}
    covered = {
        "speedup": any(
            g.metric == "speedup" and g.over == BASELINE and g.min is not None and not g.scenario for g in gates
        ),
        "cosine": bool(bounded & FIDELITY),
        "sqnr_db": bool(bounded & SIZED),
    }
    implied = (gate for gate in IMPLIED if not covered[gate.metric])
    return (*((gate, False) for gate in gates), *((gate, True) for gate in implied))


def judged_together(
    measured: Collection[str], gates: Sequence[Gate], compare: Compare
) -> frozenset[tuple[str, str | StoredReport, str]]:
    """Return every ratio that a speed-up gate judges, implied gates included, as (row, over, scenario).

    Args:
        measured: the rows that have times, eager among them.
        gates: the recipe's.
        compare: its ratios are not read, for their intervals depend on how many are judged.
    """
    return frozenset(
        (name, over, scenario)
        for gate, _ in effective_gates(gates)
        if gate.metric == "speedup"
        for name in measured
        if name != BASELINE
        for over in (_over(gate, name, compare),)
        if over != name and (isinstance(over, StoredReport) or over in measured)
        for scenario in compare.noise
        if gate.scenario in (None, scenario)
    )


def quotient(ours: Figure, theirs: Figure) -> Figure:
    """Return `ours` over `theirs`, two ratios from different runs.

    They are independent, so on the log scale each side's distance to its end is the root of the sum of both squares.
    """
    ends = [end or 0.0 for end in (ours.low, ours.high, theirs.low, theirs.high)]
    value = ours.value / theirs.value
    if min(ends) <= 0 or math.inf in ends:
        return Figure(value, 0.0, math.inf)
    low, high, their_low, their_high = ends
    below = math.hypot(math.log(ours.value / low), math.log(their_high / theirs.value))
    above = math.hypot(math.log(high / ours.value), math.log(theirs.value / their_low))
    return Figure(value, value * math.exp(-below), value * math.exp(above))


def judge_row(row: Row, rows: Mapping[str, Row], gates: Sequence[Gate], compare: Compare) -> tuple[GateResult, ...]:
    """Return how every gate judges `row`. A figure that is missing or not a number never passes."""
    results: list[GateResult] = []
    for gate, implied in effective_gates(gates):
        if gate.metric == "speedup":
            found = _judge_speedup(gate, row, compare)
        else:
            found = _judge_metric(gate, row, rows, compare)
        results += [GateResult(r.gate, r.outcome, r.reason, implied) for r in found]
    return tuple(results)


def judge_variant(
    variant: str,
    chain: Sequence[str],
    judged: Mapping[str, Sequence[GateResult]],
    rows: Mapping[str, Row],
    expected: str,
) -> VariantVerdict:
    """Return what a variant ships.

    Args:
        chain: its rows that were measured, first to last.
        judged: row name to gate results.
        rows: row name to figures.
        expected: the row that the recipe asks for; missing from `chain` when its step failed.
    """
    passing = [n for n in chain if rows[n].shippable and worst(judged[n]) == "pass"]
    chosen = passing[-1] if passing else None
    if expected in chain:
        outcome = worst(judged[expected])
        reasons = tuple(f"{expected}: {r.reason}" for r in judged[expected] if r.outcome != "pass")
    else:
        outcome, reasons = "fail", (f"{expected} was not built.",)
    return VariantVerdict(variant, expected, expected if outcome == "pass" else chosen, outcome, reasons)


def ship(verdicts: Sequence[VariantVerdict], rows: Mapping[str, Row]) -> VariantVerdict | None:
    """Return the verdict whose chosen row is fastest (geometric mean over scenarios), None when nothing passed."""
    candidates = [v for v in verdicts if v.chosen is not None]
    return max(candidates, key=lambda v: overall(rows[v.chosen or ""]), default=None)


def overall(row: Row) -> float:
    """Return the geometric mean of a row's speed-ups over all scenarios; 0 when none was measured."""
    if not row.speedups:
        return 0.0
    return math.exp(sum(math.log(figure.value) for figure in row.speedups.values()) / len(row.speedups))


def worst(results: Sequence[GateResult]) -> Outcome:
    """Return the worst of the outcomes, see `worst_of`."""
    return worst_of([result.outcome for result in results])


def worst_of(outcomes: Collection[Outcome]) -> Outcome:
    """Return "fail" before "inconclusive" before "pending" before "pass"."""
    order: tuple[Outcome, ...] = ("fail", "inconclusive", "pending")
    return next((outcome for outcome in order if outcome in outcomes), "pass")


def describe(gate: Gate) -> str:
    """Return the gate as people write it: "speedup over eager >= 1"."""
    compared = gate.metric == "speedup" or gate.over != BASELINE or gate.max_drop is not None
    over = f" over {_named(gate.over)}" if compared else ""
    bounds = []
    if gate.min is not None:
        bounds.append(f">= {gate.min:g}")
    if gate.max is not None:
        bounds.append(f"<= {gate.max:g}")
    if gate.max_drop is not None:
        bounds.append(f"drop <= {gate.max_drop:g}")
    at = f" at {gate.scenario}" if gate.scenario else ""
    return f"{gate.metric}{over} {' and '.join(bounds)}{at}"


def _judge_speedup(gate: Gate, row: Row, compare: Compare) -> list[GateResult]:
    over = _over(gate, row.name, compare)
    if over == row.name:
        return [GateResult(describe(gate), "pass", "it is what the gate compares with")]
    pair = (row.name, BASELINE if isinstance(over, StoredReport) else over)
    ratios = {s: r for s, r in compare.ratios.get(pair, {}).items() if gate.scenario in (None, s)}
    if not ratios and row.pending:
        return [_pending(gate, row)]
    if not ratios:
        why = f": {row.not_measured.rstrip('.')}" if row.not_measured else ""
        return [GateResult(describe(gate), "fail", f"{describe(gate)}: no ratio was measured{why}.")]
    if isinstance(over, StoredReport):
        stored = compare.stored[over.report]
        return [_judge_against(gate, s, figure, stored, over.row or row.name, compare) for s, figure in ratios.items()]
    return [_judge_interval(gate, s, figure, compare.noise[s], compare) for s, figure in ratios.items()]


def _pending(gate: Gate, row: Row) -> GateResult:
    return GateResult(describe(gate), "pending", f"{describe(gate)}: pending: needs {row.pending}.")


def _judge_against(
    gate: Gate, scenario: str, figure: Figure, stored: Stored, name: str, compare: Compare
) -> GateResult:
    if stored.differs:
        return _unequal(gate, stored)
    there = stored.rows[name].speedups.get(scenario) if name in stored.rows else None
    if there is None:
        text = f"{describe(gate)}: the report has no speed-up of {name} at {scenario}."
        return GateResult(describe(gate), "fail", text)
    # Two runs, and in each of them eager differed from itself.
    noise = math.hypot(math.log1p(compare.noise[scenario]), math.log1p(stored.noise.get(scenario, math.inf)))
    return _judge_interval(gate, scenario, quotient(figure, there), math.expm1(noise), compare)


def _unequal(gate: Gate, stored: Stored) -> GateResult:
    text = f"{describe(gate)}: the report is of an unequal machine ({stored.differs}), so speeds can't be compared."
    return GateResult(describe(gate), "inconclusive", text)


def _judge_interval(gate: Gate, scenario: str, figure: Figure, noise: float, compare: Compare) -> GateResult:
    """Judge by the end of the interval that counts, widened by what eager differs from itself: never pass on noise."""
    low = figure.low if figure.low is not None else math.nan
    high = figure.high if figure.high is not None else math.nan
    interval = f"{figure.value:.3f}x [{low:.3f}, {high:.3f}]{_confidence(compare)}"
    text = f"{describe(gate)}: {interval} at {scenario}"
    lower, upper = gate.min if gate.min is not None else 0.0, gate.max if gate.max is not None else math.inf
    least, most = widen(figure.value, low, high, noise)
    if least >= lower and most <= upper:
        return GateResult(describe(gate), "pass", f"{text}.")
    if most < lower or least > upper:
        return GateResult(describe(gate), "fail", f"{text} is outside it.")
    if noise == math.inf or not low > 0:
        why = "from a single group: too few to tell" if not low > 0 else "without a second worker of eager beside it"
        text = f"{describe(gate)}: {figure.value:.3f}x at {scenario}"
        return GateResult(describe(gate), "inconclusive", f"{text}, {why}.")
    return GateResult(
        describe(gate), "inconclusive", f"{text}, where eager differs from itself by {noise:.1%}: this can't be told."
    )


def _confidence(compare: Compare) -> str:
    """Return what to say behind an interval that isn't one of 95 %, with digits enough to tell it from 100 %."""
    if compare.comparisons == 1:
        return ""
    digits = max(1, math.ceil(math.log10(compare.comparisons / 5)))
    return f" ({compare.level:.{digits}%}, one of {compare.comparisons} judged together)".replace("%", " %")


def _judge_metric(gate: Gate, row: Row, rows: Mapping[str, Row], compare: Compare) -> list[GateResult]:
    """Judge a figure that has one value, or one in each scenario ("p50_ms@batch=1"), which must all hold."""
    if gate.metric in row.metrics:
        return [_judge_figure(gate, gate.metric, row, rows, compare)]
    prefix = f"{gate.metric}@"
    names = [f"{prefix}{scenario}" for scenario in compare.noise if gate.scenario in (None, scenario)]
    if not any(name in row.metrics for name in names):
        if row.pending:
            return [_pending(gate, row)]
        there = ", ".join(sorted({name.split("@")[0] for name in row.metrics})) or "none"
        return [GateResult(describe(gate), "fail", f"{describe(gate)}: there is no such figure (measured: {there}).")]
    return [_judge_figure(gate, name, row, rows, compare) for name in names]


def _judge_figure(gate: Gate, name: str, row: Row, rows: Mapping[str, Row], compare: Compare) -> GateResult:
    at = f" at {name.split('@', 1)[1]}" if "@" in name and not gate.scenario else ""
    figure = row.metrics.get(name)
    if figure is None:
        return GateResult(describe(gate), "inconclusive", f"{describe(gate)}: too few calls to know it{at}.")
    text = f"{describe(gate)}: {_shown(figure)}{at}"
    if not math.isfinite(figure.value):
        return GateResult(describe(gate), "fail", f"{text} is not a number.")
    outcomes: list[Outcome] = []
    if gate.max_drop is not None:
        over = _over(gate, row.name, compare)
        stored = compare.stored[over.report] if isinstance(over, StoredReport) else None
        other = (stored.rows if stored else rows).get(over if isinstance(over, str) else over.row or row.name)
        base = other.metrics.get(name) if other else None
        if base is None:
            return GateResult(describe(gate), "fail", f"{describe(gate)}: {_named(gate.over)} has no such figure.")
        text += f" against {_shown(base)}"
        outcomes.append(_judge_bounds(_drop(base, figure, row, paired=stored is None), None, gate.max_drop))
    outcomes.append(_judge_bounds(figure, gate.min, gate.max))
    outcome = worst_of(outcomes)
    said = {
        "pass": ".",
        "fail": " is outside it.",
        "inconclusive": ": the interval holds the limit, so it can't be told.",
    }
    return GateResult(describe(gate), outcome, text + said[outcome])


def _judge_bounds(figure: Figure, lower: float | None, upper: float | None) -> Outcome:
    low = figure.value if figure.low is None else figure.low
    high = figure.value if figure.high is None else figure.high
    if (lower is not None and not high >= lower) or (upper is not None and not low <= upper):
        return "fail"
    inside = (lower is None or low >= lower) and (upper is None or high <= upper)
    return "pass" if inside else "inconclusive"


def _drop(base: Figure, figure: Figure, row: Row, *, paired: bool) -> Figure:
    """Return how far `figure` is below `base`, with an interval as if both had been measured apart.

    Where they are `paired`, they come from the same samples and the true interval is narrower: this one errs to the
    safe side. A stored report may come from other samples, so there equal outputs say nothing.
    """
    drop = base.value - figure.value
    exact = row.metrics.get("sqnr_db")
    if paired and exact is not None and exact.value >= EXACT_DB:
        return Figure(drop)
    below = math.hypot(_reach(base, base.low), _reach(figure, figure.high))
    above = math.hypot(_reach(base, base.high), _reach(figure, figure.low))
    return Figure(drop, drop - below, drop + above)


def _reach(figure: Figure, end: float | None) -> float:
    return 0.0 if end is None else abs(end - figure.value)


def _shown(figure: Figure) -> str:
    interval = "" if figure.low is None or figure.high is None else f" [{figure.low:.4f}, {figure.high:.4f}]"
    return f"{figure.value:.4f}{interval}"


def _over(gate: Gate, name: str, compare: Compare) -> str | StoredReport:
    """Return the row that a gate compares `name` with, "" for none; a stored report with its row filled in."""
    if isinstance(gate.over, StoredReport):
        return gate.over if gate.over.row else gate.over.model_copy(update={"row": name})
    if gate.over == BASELINE:
        return BASELINE
    if gate.over == "previous":
        return compare.previous.get(name, "")
    return compare.finals.get(gate.over, "")


def _named(over: str | StoredReport) -> str:
    if isinstance(over, str):
        return over
    return f"{over.row or 'the same step'} in {over.report}"
