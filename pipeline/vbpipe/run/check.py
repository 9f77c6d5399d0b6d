"""Compare what a step made with eager, on the check samples, before anybody builds on it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vbpipe import fidelity, samples
from vbpipe.core import Artifact
from vbpipe.errors import StepFailed, VbpipeError
from vbpipe.runner import Runner, defining_runner, open_runner

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    Row = dict[str, Array]

EXACT_LIMIT = 1e-2
"""Largest error of a step that must not change results, as a share of the output's largest value. Float graph
optimizers stay near 1e-5; a wrong graph is off by far more than 1e-2."""


def check(
    kind: str, out: Path, runner: Runner, inputs: Mapping[str, Artifact], root: Path, keeps: str | None
) -> Mapping[str, Any]:
    """Run the artifact in `out` on every check sample and return its closeness to eager, by metric name.

    Args:
        inputs: must hold "samples" and "reference".
        keeps: the kind of the input whose outputs the step promises to keep; None when it may change them.

    Raises:
        StepFailed: it can't run a size inside the profile; an output is missing, not finite, wrongly shaped or typed;
            or it differs from the input that it promises to keep.
    """
    asked = samples.load(inputs["samples"].path / "check.safetensors")
    expected = _in_order(inputs["reference"].path)
    got = _answers(kind, out, runner, root, asked, expected)
    if keeps is not None and keeps != "reference":
        source = inputs[keeps]
        before = _answers(keeps, source.path, defining_runner(keeps) or runner, root, asked, expected)
        _refuse_change(got, before, keeps)
    elif keeps is not None:
        _refuse_change(got, expected, keeps)
    return {**fidelity.compare(got, expected).as_metrics(), "samples": len(got)}


def _answers(
    kind: str, path: Path, runner: Runner, root: Path, asked: Sequence[Row], expected: Sequence[Row]
) -> list[Row]:
    got: list[Row] = []
    with open_runner(runner, kind, path, root) as run:
        for sample, want in zip(asked, expected, strict=True):
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in sample.items())
            try:
                outputs = run(sample)
            except VbpipeError as error:
                raise StepFailed(
                    f"it does not run on {shapes}: {error}",
                    hint="Eager runs this size, and it is inside the profile of model.shapes.",
                ) from error
            problem = fidelity.broken(outputs, want)
            if problem:
                raise StepFailed(f"on {shapes}, {problem}.", hint="Eager's output on the same sample is the reference.")
            got.append({name: outputs[name] for name in want})
    return got


def _refuse_change(got: Sequence[Row], before: Sequence[Row], kind: str) -> None:
    found = fidelity.compare(got, before)
    if found.max_relative > EXACT_LIMIT:
        raise StepFailed(
            f"its outputs differ from those of the {kind} that it was made from by {found.max_relative:.2g} of their "
            f"largest value (cosine {found.cosine:.4f}); this step must not change them.",
            hint="The graph is wrong for at least one size inside the profile.",
        )


def _in_order(reference: Path) -> list[Row]:
    """Return eager's outputs with the recipe's first output first: files keep them by name."""
    names = json.loads((reference / "model.json").read_text(encoding="utf-8"))["outputs"]
    return [{name: row[name] for name in names} for row in samples.load(reference / "reference.safetensors")]
