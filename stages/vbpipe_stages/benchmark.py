"""Time every row of a target against eager, in one interleaved run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from vbpipe import measure, samples
from vbpipe.core import Inputs, Meta, Site, Spec, Stage
from vbpipe.decide import BASELINE
from vbpipe.errors import StepFailed
from vbpipe.plan import Layout
from vbpipe.recipe.model import Model, Recipe, Target
from vbpipe.runner import Runner, configured, open_runner
from vbpipe_stages._user_code import dependencies, installed
from vbpipe_stages._work import count_flops

WORK = "work.json"
"""Scenario to the operations that eager does, the bytes that go in and out, and the rows (size of the first axis)."""

SUBJECTS = "subjects.json"
"""What the raw times are of: every row's artifact and who ran it, the model, the libraries and the host's GPU."""

LIBRARIES = ("numpy", "vbpipe", "torch", "onnxruntime", "onnxruntime-gpu")

_SEED = 20
_WRONG_BELOW = 0.5
"""Cosine to eager below which an answer is wrong, not inaccurate: such a candidate is never timed. Accuracy itself is
judged by the gates, on real samples."""


class Benchmark(Spec):
    """Measurements belong to the machine that took them: its identity is part of the key."""

    name: ClassVar[str] = "benchmark"
    version: ClassVar[int] = 3
    scope: ClassVar[Literal["chain", "each", "target"]] = "target"
    after: ClassVar[tuple[str, ...]] = ("build", "evaluate")
    in_recipe: ClassVar[bool] = True
    exclusive: ClassVar[bool] = True
    """Nothing else runs while this does."""

    scenarios: tuple[Mapping[str, Annotated[int, Field(ge=1)]], ...] = ()
    """Sizes to measure, symbol to size; symbols left out take their optimum, and without any all do."""
    precision: Annotated[float, Field(gt=0, le=1)] = 0.02
    """Stop when every ratio's 95 % interval is at most this wide to each side."""
    budget_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds for the whole measurement, process starts included."""
    margin: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Differences up to this are "same", unless the noise floor measured in the same run is larger."""
    min_groups: Annotated[int, Field(ge=2, le=1000)] = 8
    """Fresh sets of processes; the interval is taken over them."""
    max_groups: Annotated[int, Field(ge=2, le=1000)] = 40
    call_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """A row whose engine takes longer for one call is hung, and is not measured. Opening and the first calls have two
    minutes, or this if it is more; later requests get ten times what their calls have taken so far on top."""
    memory_limit_mib: Annotated[int, Field(ge=1)] | None = None
    """The most address space that the process of a row may take; no limit when absent."""

    model: SkipJsonSchema[Model | None] = None
    """Set by `configure`, as are `recipe` and `threads`."""
    recipe: SkipJsonSchema[str | None] = None
    threads: SkipJsonSchema[int] = 1
    runners: SkipJsonSchema[Mapping[str, Runner]] = {}
    """Set by `for_target`."""
    chains: SkipJsonSchema[Mapping[str, tuple[str, ...]]] = {}
    pending: SkipJsonSchema[str | None] = None
    """What it takes to run the engines and this host lacks: then nothing is timed, and the outcome of every row says
    so. Times of graphs on this host's processor would say nothing of that device."""
    taken: SkipJsonSchema[int | None] = None
    """Set by `vbpipe bench` to the time of the call: a measurement that no earlier one can stand for."""

    @classmethod
    def configure(cls, recipe: Recipe, target: Target) -> tuple[Stage, ...]:
        facts = {"model": recipe.model, "recipe": recipe.name, "threads": target.threads}
        return (cls.model_validate({**recipe.stages.get(cls.name, {}), **facts}),)

    def for_target(self, layout: Layout) -> Stage:
        told = {"runners": dict(layout.runners), "chains": dict(layout.chains), "pending": layout.pending}
        return self.model_copy(update=told)

    def label(self) -> str:
        return self.name

    def consumes(self) -> frozenset[str]:
        return frozenset({"reference", "torchscript", "onnx", "engine"})

    def produces(self) -> str:
        return "measurement"

    def fingerprint(self, root: Path) -> Mapping[str, str]:
        versions = {name: metadata.version(name) for name in ("numpy", "vbpipe")}
        found = {**versions, **{f"host.{name}": value for name, value in measure.host_identity().items()}}
        for runner in self.runners.values():
            runtime = configured(runner).fingerprint()
            found |= {f"{runner.backend}.{name}": value for name, value in runtime.items()}
        # Eager's speed is in its source, which equal outputs say nothing of.
        assert self.model is not None, "configure() sets it"
        return {**found, **dependencies(self.model.factory, self.model, root)}

    def run(self, inputs: Inputs, out: Path, site: Site) -> Meta:
        if set(inputs) <= {BASELINE}:
            raise StepFailed("nothing but eager was built, so there is nothing to compare.")
        asked = {samples.describe(sizes): sizes for sizes in self.sizes()}
        if self.pending is not None:
            return self._put_off(list(asked), inputs, out)
        scenarios = self._write_scenarios(asked, out)
        expected = {row: self._answers(row, scenarios, inputs, out, site) for row in self._references(inputs)}
        work = self._count_work(scenarios, inputs, site)
        self._describe(work, inputs, out)
        candidates = [
            measure.Candidate(
                name=row,
                backend=self.runners[row].backend,
                options=dict(self.runners[row].options),
                kind=artifact.kind,
                path=artifact.path,
                root=site.root,
                min_cosine=_WRONG_BELOW,
                expected=expected[self._reference_of(row)],
            )
            for row, artifact in inputs.items()
        ]
        found = measure.measure(candidates, scenarios, self._settings(), baseline=BASELINE, progress=site.progress)
        found.save(out)
        return _summary(found)

    def sizes(self) -> tuple[Mapping[str, int], ...]:
        """Return the sizes to measure, each with every symbol of the profile."""
        assert self.model is not None, "configure() sets it"
        optimum = {name: dim.opt for name, dim in self.model.shapes.items()}
        return tuple({**optimum, **sizes} for sizes in self.scenarios) or (optimum,)

    def _settings(self) -> measure.Settings:
        return measure.Settings(
            threads=self.threads,
            min_groups=self.min_groups,
            max_groups=max(self.min_groups, self.max_groups),
            precision=self.precision,
            budget_s=self.budget_s,
            margin=self.margin,
            seed=_SEED,
            call_timeout_s=self.call_timeout_s,
            memory_limit_mib=self.memory_limit_mib,
        )

    def _put_off(self, scenarios: Sequence[str], inputs: Inputs, out: Path) -> Meta:
        """Write a measurement without times, whose outcomes say what it takes to have them."""
        self._describe({}, inputs, out)
        outcomes = [measure.Outcome(row, "pending", f"needs {self.pending}.") for row in inputs]
        found = measure.Measurement(
            baseline=BASELINE,
            control=None,
            scenarios=tuple(scenarios),
            settings=self._settings(),
            host=measure.host_facts(),
            elapsed_s=0.0,
            groups=(),
            outcomes=tuple(outcomes),
        )
        found.save(out)
        return _summary(found)

    def _describe(self, work: Mapping[str, Any], inputs: Inputs, out: Path) -> None:
        (out / WORK).write_text(json.dumps(work, indent=1) + "\n", encoding="utf-8")
        (out / SUBJECTS).write_text(json.dumps(self._subjects(inputs), indent=1) + "\n", encoding="utf-8")

    def _subjects(self, inputs: Inputs) -> dict[str, Any]:
        assert self.model is not None, "configure() sets it"
        rows = {
            row: {
                "kind": artifact.kind,
                "digest": artifact.digest,
                "backend": self.runners[row].backend,
                "options": dict(self.runners[row].options),
            }
            for row, artifact in inputs.items()
        }
        return {
            "format": 1,
            "recipe": self.recipe,
            "model": {"factory": self.model.factory, "reference": inputs[BASELINE].digest},
            "seed": _SEED,
            "libraries": {name: found for name in LIBRARIES if (found := installed(name)) != "absent"},
            "gpu": gpu_facts(),
            "rows": rows,
        }

    def _write_scenarios(self, asked: Mapping[str, Mapping[str, int]], out: Path) -> list[measure.Scenario]:
        assert self.model is not None, "configure() sets it"
        scenarios = []
        for index, (name, sizes) in enumerate(asked.items()):
            path = out / f"inputs-{index}.safetensors"
            samples.save_arrays(path, samples.synthesize(self.model, sizes, _SEED + index))
            scenarios.append(measure.Scenario(name, path))
        return scenarios

    def _reference_of(self, row: str) -> str:
        """Return the eager row of the variant that a row belongs to."""
        return next(chain[0] for chain in self.chains.values() if row in chain)

    def _references(self, inputs: Inputs) -> list[str]:
        return [row for row in dict.fromkeys(chain[0] for chain in self.chains.values()) if row in inputs]

    def _answers(
        self, row: str, scenarios: Sequence[measure.Scenario], inputs: Inputs, out: Path, site: Site
    ) -> dict[str, Path]:
        """Write what a variant's eager answers in every scenario: who answers wrongly is never timed."""
        found: dict[str, Path] = {}
        with open_runner(self.runners[row], inputs[row].kind, inputs[row].path, site.root) as run:
            for scenario in scenarios:
                site.progress(None, f"{row}'s outputs at {scenario.name}")
                path = out / f"{scenario.inputs.stem}-of-{row.replace('/', '-')}.safetensors"
                samples.save_arrays(path, run(samples.load_arrays(scenario.inputs)))
                found[scenario.name] = path
        return found

    def _count_work(
        self, scenarios: Sequence[measure.Scenario], inputs: Inputs, site: Site
    ) -> dict[str, dict[str, float]]:
        eager, found = inputs[BASELINE], {}
        with open_runner(self.runners[BASELINE], eager.kind, eager.path, site.root) as run:
            for scenario in scenarios:
                sample = samples.load_arrays(scenario.inputs)
                flops, outputs = count_flops(run, sample)
                moved = sum(array.nbytes for array in (*sample.values(), *outputs.values()))
                rows = next(iter(sample.values())).shape[:1]
                found[scenario.name] = {"flops": flops, "io_bytes": moved, "rows": rows[0] if rows else 1}
        return found


def _summary(found: measure.Measurement) -> Meta:
    return {
        "groups": len(found.groups),
        "problems": [str(problem) for problem in found.problems],
        "not_measured": {o.candidate: f"{o.status}: {o.message}" for o in found.outcomes if o.status != "measured"},
    }


def gpu_facts() -> str:
    """Return what is known of the host's GPU: that there is none, or that its state isn't read yet."""
    if Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi"):
        return "pending: GPU clocks, power and temperature are not read yet"
    return "none seen"


PLUGIN: type[Stage] = Benchmark
