"""Score one runnable artifact: the recipe's own metrics, and how close its outputs are to eager's."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vbpipe import fidelity, samples
from vbpipe.core import Inputs, Meta, Run, Site, Spec, Stage
from vbpipe.decide import MEASURED
from vbpipe.errors import VbpipeError
from vbpipe.recipe.model import Model, Recipe, Reference, Target
from vbpipe.recipe.references import resolve
from vbpipe.runner import Runner, configured, open_runner
from vbpipe_stages._user_code import blame, dependencies, seed

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    Row = dict[str, Array]

RECORDED_BYTES = 256 * 2**20
"""Outputs of evaluation are kept up to this size; calls beyond it are counted, not compared."""

METRICS, OUTPUTS, RECORD = "metrics.json", "outputs.safetensors", "record.json"
Figure = dict[str, float]
"""`value`, and `low` and `high` of its 95 % interval and `n` where the function gave them."""


class Evaluate(Spec):
    """Write `metrics.json`; for the reference also the outputs that all others are compared with."""

    name: ClassVar[str] = "evaluate"
    version: ClassVar[int] = 1
    scope: ClassVar[Literal["chain", "each", "target"]] = "each"
    after: ClassVar[tuple[str, ...]] = ("eager",)

    evaluation: Reference | None = None
    model: Model
    runner: Runner = Runner(backend="eager")
    """Who runs the subject; set by `for_subject`."""

    @classmethod
    def configure(cls, recipe: Recipe, target: Target) -> tuple[Stage, ...]:
        """Return the one step; `for_subject` tells it what it looks at."""
        del target
        return (cls(evaluation=recipe.data.evaluation, model=recipe.model),)

    def for_subject(self, kind: str, runner: Runner) -> Evaluate:
        """Return the stage that scores an artifact of `kind`, run by `runner`."""
        del kind
        if runner.backend == "eager":
            return self.model_copy(update={"runner": runner})
        # The artifact holds the model: what builds it is no part of this step's key.
        blank = self.model.model_copy(update={"factory": "none:none", "args": {}})
        return self.model_copy(update={"runner": runner, "model": blank})

    def label(self) -> str:
        """Return "evaluate"."""
        return self.name

    def consumes(self) -> frozenset[str]:
        """Return "samples"; the subject, and eager's own evaluation as "baseline", come besides."""
        return frozenset({"samples"})

    def produces(self) -> str:
        """Return "evaluation"."""
        return "evaluation"

    def fingerprint(self, root: Path) -> Mapping[str, str]:
        """Return the versions of who runs it, and the digests of the evaluation's source."""
        found = {f"{self.runner.backend}.{key}": value for key, value in configured(self.runner).fingerprint().items()}
        if self.runner.backend == "eager":
            found |= dependencies(self.model.factory, self.model, root)
        if self.evaluation is not None:
            found |= dependencies(self.evaluation, self.model, root)
        return found

    def run(self, inputs: Inputs, out: Path, site: Site) -> Meta:
        """Run the evaluation and compare.

        Raises:
            VbpipeError: the evaluation raises, gives no finite numbers, or calls `run` another number of times than
                it did for eager; or an output is NaN or misshapen where eager's is not.
            EngineError: the artifact can't be opened, or refuses a sample.
        """
        subject = inputs["subject"]
        with open_runner(self.runner, subject.kind, subject.path, site.root) as run:
            plain = _Recorder(run, site)
            for row in self._plain_rows(inputs["samples"].path):
                plain(row)
            called = _Recorder(run, site)
            metrics = self._score(called, site.root) if self.evaluation else {}
        if "baseline" in inputs:
            compared = self._compare(plain, called, inputs["baseline"].path, subject.kind)
        else:
            compared = {}
            self._keep(plain, called, out)
        found = {**metrics, **{name: {"value": value} for name, value in compared.items()}}
        (out / METRICS).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return {
            "metrics": {name: figure["value"] for name, figure in sorted(found.items())},
            "calls": called.calls,
            "compared": len(called.outputs) if self.evaluation else len(plain.outputs),
            "evaluation": self.evaluation,
        }

    def _plain_rows(self, folder: Path) -> list[Row]:
        """Return the check samples; without an evaluation also the calibration samples, which are all there is."""
        rows = samples.load(folder / "check.safetensors")
        return rows if self.evaluation else [*rows, *samples.load(folder / "calibration.safetensors")]

    def _score(self, run: _Recorder, root: Path) -> dict[str, Figure]:
        reference = self.evaluation
        assert reference is not None
        function = resolve(reference, root)
        seed()
        with blame(f"data.evaluation {reference}", root, where=reference):
            returned = function(run)
        if not isinstance(returned, Mapping) or not returned:
            raise VbpipeError(f"it returned {_shown(returned)}.", where=reference, hint=_CONTRACT)
        if not run.calls:
            raise VbpipeError("it never called `run`.", where=reference, hint="Score what `run` returns.")
        return {_metric_name(name, reference): _figure(name, value, reference) for name, value in returned.items()}

    def _keep(self, plain: _Recorder, called: _Recorder, out: Path) -> None:
        samples.save(out / OUTPUTS, [*plain.outputs, *called.outputs])
        record = {"plain": len(plain.outputs), "calls": called.calls, "recorded": len(called.outputs)}
        (out / RECORD).write_text(json.dumps(record, sort_keys=True) + "\n", encoding="utf-8")

    def _compare(self, plain: _Recorder, called: _Recorder, baseline: Path, kind: str) -> dict[str, float]:
        record = json.loads((baseline / RECORD).read_text(encoding="utf-8"))
        if called.calls != record["calls"]:
            raise VbpipeError(
                f"it called `run` {called.calls} times for the {kind} and {record['calls']} times for eager.",
                where=self.evaluation or "",
                hint="It must ask every engine the same questions: take its inputs from data, not from outputs.",
            )
        # Files list arrays by name; the first output is the recipe's first.
        rows = [{name: row[name] for name in self.model.outputs} for row in samples.load(baseline / OUTPUTS)]
        expected_plain, expected = rows[: record["plain"]], rows[record["plain"] :]
        first = _fidelity(plain.outputs, expected_plain, "sample")
        if not self.evaluation:
            return first
        checked = {f"check_{name}": value for name, value in first.items()}
        return {**checked, **_fidelity(called.outputs[: len(expected)], expected, "call")}


class _Recorder:
    """The `run` that evaluation gets: counts calls and keeps outputs while they are small enough together."""

    def __init__(self, run: Run, site: Site) -> None:
        self._run = run
        self._site = site
        self._bytes = 0
        self.calls = 0
        self.outputs: list[Row] = []

    def __call__(self, arrays: Mapping[str, Array]) -> Row:
        found = self._run(arrays)
        self.calls += 1
        self._bytes += samples.total_bytes([found])
        if self._bytes <= RECORDED_BYTES:
            # Copies: the caller may change what it gets, and an engine may use its memory again.
            self.outputs.append({name: array.copy() for name, array in found.items()})
        self._site.progress(None, f"call {self.calls}")
        return found


_CONTRACT = "It must return {metric: number}, or {metric: {value, low, high}}."
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")


def _fidelity(outputs: Sequence[Row], expected: Sequence[Row], what: str) -> dict[str, float]:
    for index, (got, wanted) in enumerate(zip(outputs, expected, strict=True)):
        problem = fidelity.broken(got, wanted)
        if problem:
            raise VbpipeError(f"{problem}.", where=f"{what} {index}", hint="The step that made it broke the model.")
    if not expected:
        return {}
    return fidelity.compare(outputs, expected).as_metrics()


def _metric_name(name: object, reference: str) -> str:
    if not isinstance(name, str) or not _NAME.match(name):
        raise VbpipeError(
            f"{name!r} is no name for a metric.", where=reference, hint="Use letters, digits and ._- only."
        )
    if name in MEASURED or name.removeprefix("check_") in MEASURED:
        raise VbpipeError(
            f"metric {name!r} is measured by vbpipe itself.", where=reference, hint="Give it another name."
        )
    return name


def _figure(name: str, value: object, reference: str) -> Figure:
    parts = value if isinstance(value, Mapping) else {"value": value}
    unknown = sorted(str(key) for key in parts.keys() - {"value", "low", "high", "n"})
    if unknown or "value" not in parts:
        raise VbpipeError(f"metric {name!r} has the keys {sorted(map(str, parts))}.", where=reference, hint=_CONTRACT)
    found = {
        str(key): _number(f"{name}.{key}" if len(parts) > 1 else name, part, reference) for key, part in parts.items()
    }
    if not found.get("low", -math.inf) <= found["value"] <= found.get("high", math.inf):
        raise VbpipeError(f"metric {name!r} lies outside its own interval: {found}.", where=reference)
    return found


def _number(name: str, value: object, reference: str) -> float:
    plain = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    if callable(plain) or isinstance(plain, bool) or not isinstance(plain, int | float):
        raise VbpipeError(f"metric {name!r} is {_shown(value)}, not a number.", where=reference, hint=_CONTRACT)
    if not math.isfinite(plain):
        raise VbpipeError(
            f"metric {name!r} is {plain}.",
            where=reference,
            hint="A share of nothing, or a constant output, gives that.",
        )
    return float(plain)


def _shown(value: object) -> str:
    return f"a {type(value).__name__}" + (f" ({repr(value)[:60]})" if not hasattr(value, "shape") else "")


PLUGIN: type[Stage] = Evaluate
