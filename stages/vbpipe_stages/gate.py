"""Judge every row by the gates, and decide what each variant falls back to and what is shipped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Literal

from vbpipe import decide, measure, samples
from vbpipe.core import Inputs, Meta, Site, Spec, Stage
from vbpipe.decide import BASELINE, Compare, Figure, GateResult, Row, Stored, VariantVerdict
from vbpipe.errors import UsageError
from vbpipe.measure import Measurement
from vbpipe.plan import ENGINE, Layout
from vbpipe.recipe.model import Gate as GateRule
from vbpipe.recipe.model import Recipe, StoredReport, Target
from vbpipe.report.stored import lacking, stored_target
from vbpipe_stages._damage import FILE as DAMAGE
from vbpipe_stages._damage import describe_damage, read_damage, tolerance_db
from vbpipe_stages.benchmark import SUBJECTS, WORK

EAGER = "eager"
"""The backend that runs the recipe's own code."""


class Gate(Spec):
    """Reads measurements, decides, writes `verdict.json`; measures nothing itself."""

    name: ClassVar[str] = "gate"
    version: ClassVar[int] = 3
    scope: ClassVar[Literal["chain", "each", "target"]] = "target"
    after: ClassVar[tuple[str, ...]] = ("benchmark", "evaluate")

    gates: tuple[GateRule, ...]
    chains: Mapping[str, tuple[str, ...]] = {}
    previous: Mapping[str, str] = {}
    unshippable: tuple[str, ...] = ()
    """Rows that run the recipe's own code: there is no engine to put into a bundle."""
    pending: str | None = None
    """What it takes to run the target's engines and this host lacks."""
    target: str | None = None
    """Where a gate compares with a stored report: the target's name, there and here."""

    @classmethod
    def configure(cls, recipe: Recipe, target: Target) -> tuple[Stage, ...]:
        return (cls(gates=tuple(_canonical(gate, recipe) for gate in recipe.gates)),)

    def for_target(self, layout: Layout) -> Stage:
        own_code = tuple(sorted(name for name, runner in layout.runners.items() if runner.backend == EAGER))
        told = {"chains": dict(layout.chains), "previous": dict(layout.previous), "unshippable": own_code}
        told |= {"pending": layout.pending}
        return self.model_copy(update={**told, "target": layout.target if any(self._stored_gates()) else None})

    def label(self) -> str:
        return self.name

    def consumes(self) -> frozenset[str]:
        return frozenset({"measurement", "evaluation", "reference", "torchscript", "onnx", "engine"})

    def produces(self) -> str:
        return "verdict"

    def fingerprint(self, root: Path) -> Mapping[str, str]:
        reports = sorted({over.report for _, over in self._stored_gates()})
        return {
            "vbpipe": metadata.version("vbpipe"),
            **{f"report.{name}": _digest(root / name) for name in reports},
        }

    def run(self, inputs: Inputs, out: Path, site: Site) -> Meta:
        measurement = Measurement.load(inputs["measurement"].path)
        work = json.loads((inputs["measurement"].path / WORK).read_text(encoding="utf-8"))
        subjects = json.loads((inputs["measurement"].path / SUBJECTS).read_text(encoding="utf-8"))
        rows = {name: self._row(name, inputs, measurement, work) for name in self._row_names() if name in inputs}
        compare = self._compare(measurement, rows, site.root, subjects["recipe"])
        judged = {name: decide.judge_row(row, rows, self.gates, compare) for name, row in rows.items()}
        verdicts = [
            _explained(self._judge_variant(v, chain, judged, rows), chain, judged, self.gates, inputs)
            for v, chain in self.chains.items()
        ]
        shipped = decide.ship(verdicts, rows)
        body = {
            "format": 1,
            "shipped": {"row": shipped.chosen, "variant": shipped.variant} if shipped else None,
            "why_nothing": "" if shipped else _why_nothing(verdicts),
            "pending": self.pending,
            "variants": {v.variant: asdict(v) for v in verdicts},
            "rows": {name: self._describe(name, rows, judged, compare, inputs, measurement) for name in rows},
            "host": dict(measure.host_identity()),
            "gpu": subjects["gpu"],
            "libraries": subjects["libraries"],
            "scenarios": list(measurement.scenarios),
            "work": work,
            "gated": sorted({gate.metric for gate in self.gates}),
            "judged_together": compare.comparisons,
            "noise_floor": {name: _finite(measure.noise_floor(measurement, name)) for name in measurement.scenarios},
            "problems": [*(str(problem) for problem in measurement.problems), *_warnings(inputs)],
        }
        (out / "verdict.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        return {"outcome": decide.worst_of([v.outcome for v in verdicts]), "shipped": body["shipped"]}

    def _row(self, name: str, inputs: Inputs, measurement: Measurement, work: Mapping[str, Mapping[str, float]]) -> Row:
        metrics = {"size_mb": Figure(_size(inputs[name].path) / 1e6), **_times(measurement, name, work)}
        for key in inputs:
            if key.startswith(f"{self._scored(name, inputs)}@"):
                metrics |= _evaluation(inputs[key].path)
        speedups = {} if name == BASELINE else _ratios(measurement, name, BASELINE)
        shippable = name not in self.unshippable
        return Row(name, speedups, metrics, shippable, _not_measured(measurement, name), self.pending or "")

    def _scored(self, name: str, inputs: Inputs) -> str:
        """Return the row whose outputs stand for this one's: that of its graph, for an engine that can't run here."""
        alone = self.pending is not None and inputs[name].kind == ENGINE
        return self.previous.get(name, name) if alone else name

    def _row_names(self) -> list[str]:
        return list(dict.fromkeys(name for chain in self.chains.values() for name in chain))

    def _stored_gates(self) -> Iterator[tuple[GateRule, StoredReport]]:
        return ((gate, gate.over) for gate in self.gates if isinstance(gate.over, StoredReport))

    def _compare(self, measurement: Measurement, rows: Mapping[str, Row], root: Path, recipe: str | None) -> Compare:
        noise = {scenario: measure.noise_floor(measurement, scenario) for scenario in measurement.scenarios}
        finals = {variant: chain[-1] for variant, chain in self.chains.items()}
        asked = Compare(ratios={}, previous=dict(self.previous), finals=finals, noise=noise)
        measured = [name for name in rows if name in measurement.measured]
        together = decide.judged_together(measured, self.gates, asked)
        asked = replace(asked, comparisons=max(1, len(together)))
        pairs = {(name, BASELINE if isinstance(over, StoredReport) else over) for name, over, _ in together}
        ratios = {pair: _ratios(measurement, *pair, comparisons=asked.comparisons) for pair in sorted(pairs)}
        return replace(asked, ratios=ratios, stored=self._read_stored(measurement, rows, root, recipe, asked.level))

    def _read_stored(
        self, measurement: Measurement, rows: Mapping[str, Row], root: Path, recipe: str | None, level: float
    ) -> dict[str, Stored]:
        """Return the reports that gates compare with; raises UsageError where one lacks what a gate needs."""
        here = {**measure.host_identity(), "threads": str(measurement.settings.threads)}
        assert self.target is not None or not any(self._stored_gates()), "for_target() sets it"
        found = {
            over.report: stored_target(root / over.report, self.target or "", here, level, recipe)
            for _, over in self._stored_gates()
        }
        for gate, over in self._stored_gates():
            speed = gate.metric == "speedup"
            scenarios = [s for s in measurement.scenarios if speed and gate.scenario in (None, s)]
            for name in rows:
                if name == BASELINE or (speed and name not in measurement.measured):
                    continue
                wrong = lacking(found[over.report], over.row or name, scenarios)
                if wrong:
                    hint = "Name another row in the gate's `over`, or keep the report of a build that has it."
                    raise UsageError(wrong, where=str(root / over.report), hint=hint)
        return found

    def _judge_variant(
        self,
        variant: str,
        chain: tuple[str, ...],
        judged: Mapping[str, tuple[GateResult, ...]],
        rows: Mapping[str, Row],
    ) -> VariantVerdict:
        there = [name for name in chain if name in rows]
        return decide.judge_variant(variant, there, judged, rows, expected=chain[-1])

    def _describe(
        self,
        name: str,
        rows: Mapping[str, Row],
        judged: Mapping[str, tuple[GateResult, ...]],
        compare: Compare,
        inputs: Inputs,
        measurement: Measurement,
    ) -> Mapping[str, Any]:
        floor = {s: measure.noise_floor(measurement, s) for s in measurement.scenarios}
        previous = compare.previous.get(name)
        artifact = inputs[name]
        return {
            "variants": [variant for variant, chain in self.chains.items() if name in chain],
            "kind": artifact.kind,
            "digest": artifact.digest,
            "size_bytes": _size(artifact.path),
            "effect": artifact.meta.get("effect"),
            "ratios": _described(measurement, name, BASELINE, floor),
            "previous": previous,
            "over_previous": _described(measurement, name, previous, floor) if previous else {},
            "latency": _latency(measurement, name),
            "scored": self._scored(name, inputs),
            "metrics": {key: {"value": f.value, "low": f.low, "high": f.high} for key, f in rows[name].metrics.items()},
            "check": artifact.meta.get("check", {}),
            "gates": [] if name == BASELINE else [asdict(result) for result in judged[name]],
            "outcome": "baseline" if name == BASELINE else decide.worst(judged[name]),
            "verdict": _overall_verdict(measurement, name, floor),
            "not_measured": _not_measured(measurement, name),
        }


def _canonical(gate: GateRule, recipe: Recipe) -> GateRule:
    """Return the gate with its scenario written as measurements name it: every symbol, in the order of the profile."""
    if gate.scenario is None:
        return gate
    written = dict(part.split("=", 1) for part in gate.scenario.replace(" ", "").split(",") if "=" in part)
    sizes = {name: int(written.get(name, dim.opt)) for name, dim in recipe.model.shapes.items()}
    return gate.model_copy(update={"scenario": samples.describe(sizes)})


def _explained(
    verdict: VariantVerdict,
    chain: Sequence[str],
    judged: Mapping[str, Sequence[GateResult]],
    gates: Sequence[GateRule],
    inputs: Inputs,
) -> VariantVerdict:
    """Return the verdict of a variant that is too far from eager with the modules that are the reason, if any are."""
    doubted = ("fail", "inconclusive")
    refused = {result.gate for result in judged.get(verdict.last or "", ()) if result.outcome in doubted}
    broken = [gate for gate, _ in decide.effective_gates(gates) if decide.describe(gate) in refused]
    limits = [tolerance_db(gate.min) for gate in broken if gate.metric in ("cosine", "cosine_min") and gate.min]
    limits += [gate.min for gate in broken if gate.metric == "sqnr_db" and gate.min is not None]
    damaged = next((name for name in reversed(chain) if name in inputs and (inputs[name].path / DAMAGE).exists()), None)
    if not limits or damaged is None:
        return verdict
    text = describe_damage(read_damage(inputs[damaged].path), max(limits))
    return replace(verdict, reasons=(*verdict.reasons, f"{damaged}: {text}")) if text else verdict


def _times(measurement: Measurement, name: str, work: Mapping[str, Mapping[str, float]]) -> dict[str, Figure]:
    """Return the measured figures that a gate may name; those of a scenario as "p50_ms@batch=1"."""
    cold = measure.cold_start(measurement, name)
    if cold is None or name not in measurement.measured:  # some groups' times of one that failed later are no figure
        return {}
    figures = {"process_s": cold.process_s, "load_s": cold.load_s, "peak_rss_mib": cold.peak_rss_mib}
    figures |= {f"first_ms@{scenario}": value for scenario, value in cold.first_ms.items()}
    figures |= {f"switch_ms@{scenario}": value for scenario, value in cold.switch_ms.items()}
    for scenario in measurement.scenarios:
        latency = measure.latency(measurement, name, scenario)
        if latency is None:
            continue
        figures |= {f"p50_ms@{scenario}": latency.p50_ms, f"p90_ms@{scenario}": latency.p90_ms}
        figures[f"throughput@{scenario}"] = work[scenario]["rows"] / latency.p50_ms * 1e3
        if latency.p99_ms is not None:
            figures[f"p99_ms@{scenario}"] = latency.p99_ms
    return {key: Figure(value) for key, value in figures.items()}


def _evaluation(path: Path) -> dict[str, Figure]:
    body = json.loads((path / "metrics.json").read_text(encoding="utf-8"))
    return {name: Figure(f["value"], f.get("low"), f.get("high")) for name, f in body.items()}


def _ratios(measurement: Measurement, name: str, over: str, *, comparisons: int = 1) -> dict[str, Figure]:
    if name not in measurement.measured or over not in measurement.measured:
        return {}
    found = {s: measure.ratio(measurement, name, over, s, comparisons=comparisons) for s in measurement.scenarios}
    return {s: Figure(r.value, r.low, _finite(r.high)) for s, r in found.items()}


def _described(
    measurement: Measurement, name: str, over: str, floor: Mapping[str, float]
) -> dict[str, Mapping[str, Any]]:
    if name == over or name not in measurement.measured or over not in measurement.measured:
        return {}
    found: dict[str, Mapping[str, Any]] = {}
    for scenario in measurement.scenarios:
        r = measure.ratio(measurement, name, over, scenario)
        judged = measure.verdict(r, measurement.settings.margin, floor[scenario])
        found[scenario] = {
            "value": r.value, "low": r.low, "high": _finite(r.high), "groups": r.groups, "verdict": judged
        }  # fmt: skip
    return found


def _warnings(inputs: Inputs) -> list[str]:
    """Return what steps said against their own results."""
    found = {name: artifact.meta.get("warning") for name, artifact in inputs.items()}
    return [f"{name}: {warning}" for name, warning in found.items() if warning]


def _overall_verdict(measurement: Measurement, name: str, floor: Mapping[str, float]) -> str:
    """Return "slower" if it is in any scenario, "faster" if it is in all; "mixed" in between says it depends."""
    if name == BASELINE:
        return "baseline"
    if measurement.outcome(name).status == "pending":
        return "pending"
    found = {facts["verdict"] for facts in _described(measurement, name, BASELINE, floor).values()}
    if not found:
        return "not measured"
    if len(found) == 1:
        return str(found.pop())
    return "slower" if "slower" in found else "inconclusive" if "inconclusive" in found else "mixed"


def _latency(measurement: Measurement, name: str) -> dict[str, Mapping[str, Any]]:
    if name not in measurement.measured:
        return {}
    found = {s: measure.latency(measurement, name, s) for s in measurement.scenarios}
    return {s: asdict(facts) for s, facts in found.items() if facts is not None}


def _not_measured(measurement: Measurement, name: str) -> str:
    outcome = measurement.outcome(name)
    return "" if outcome.status == "measured" else f"{outcome.status}: {outcome.message}"


def _why_nothing(verdicts: list[VariantVerdict]) -> str:
    if verdicts and all(v.outcome == "pending" for v in verdicts):
        return f"Nothing is measured yet. {verdicts[0].reasons[0]}"
    first = [f"{v.variant}: {v.reasons[0]}" if v.reasons else v.variant for v in verdicts]
    return "No row passes every gate; eager stays. " + " ".join(first)


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(
            f"the report that a gate compares with can't be read: {error.strerror}.",
            where=str(path),
            hint="Keep a build's report.json there, or correct the gate's `over`.",
        ) from error


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _finite(value: float) -> float:
    """Return the value with infinity as a large number, which JSON can hold."""
    return min(value, 1e9)


PLUGIN: type[Stage] = Gate
