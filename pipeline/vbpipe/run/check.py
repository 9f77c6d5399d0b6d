"""Compare what a step made with eager, on the check samples, before anybody builds on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vbpipe import fidelity, samples
from vbpipe.core import Artifact
from vbpipe.errors import StepFailed, VbpipeError
from vbpipe.runner import Runner, open_runner

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

EXACT_LIMIT = 1e-2
"""Largest error of a step that must not change results, as a share of the output's largest value. Exporters and float
graph optimizers stay near 1e-5; a wrong graph is off by far more than 1e-2."""


def check(
    kind: str, out: Path, runner: Runner, inputs: Mapping[str, Artifact], root: Path, *, exact: bool
) -> Mapping[str, Any]:
    """Run the artifact in `out` on every check sample and return its closeness to eager, by metric name.

    Args:
        inputs: must hold "samples" and "reference".
        exact: whether the step promises to change nothing but speed.

    Raises:
        StepFailed: it can't run a size inside the profile, or an output is missing, not finite, wrongly shaped or
            typed, or (exact) differs from eager.
    """
    asked = samples.load(inputs["samples"].path / "check.safetensors")
    expected = _in_order(inputs["reference"].path)
    got = []
    with open_runner(runner, kind, out, root) as run:
        for index, sample in enumerate(asked):
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in sample.items())
            try:
                outputs = run(sample)
            except VbpipeError as error:
                raise StepFailed(
                    f"it does not run on {shapes}: {error}",
                    hint="Eager runs this size, and it is inside the profile of model.shapes.",
                ) from error
            problem = fidelity.broken(outputs, expected[index])
            if problem:
                raise StepFailed(f"on {shapes}, {problem}.", hint="Eager's output on the same sample is the reference.")
            got.append({name: outputs[name] for name in expected[index]})
    found = fidelity.compare(got, expected)
    if exact and found.max_relative > EXACT_LIMIT:
        raise StepFailed(
            f"its outputs differ from eager's by {found.max_relative:.2g} of their largest value (cosine "
            f"{found.cosine:.4f}); this step must not change them.",
            hint="The graph is wrong for at least one size inside the profile.",
        )
    return {**found.as_metrics(), "samples": found.samples}


def _in_order(reference: Path) -> list[dict[str, Array]]:
    """Return eager's outputs with the recipe's first output first: files keep them by name."""
    names = json.loads((reference / "model.json").read_text(encoding="utf-8"))["outputs"]
    return [{name: row[name] for name in names} for row in samples.load(reference / "reference.safetensors")]
