from __future__ import annotations

import json
from pathlib import Path

import pytest

from vbpipe import samples
from vbpipe.core import cache_key
from vbpipe.errors import EngineError, VbpipeError
from vbpipe.runner import Runner, runner_for
from vbpipe_stages import evaluate as module
from vbpipe_stages.eager import Eager
from vbpipe_stages.evaluate import Evaluate
from vbpipe_stages.export import Export
from vbpipe_stages.samples import Samples

HERE = Path(__file__).parent


@pytest.fixture
def scored(model_of, recipe_of, run_chain, run_stage):
    """Return a function that scores eager and its TorchScript with an evaluation: (reference's, program's)."""

    def run(evaluation: str | None, subjects: int = 2):
        data = {"evaluation": f"little_models.py:{evaluation}"} if evaluation else {}
        recipe = recipe_of(model_of("plain"), data=data, stages={"export": {"formats": ["torchscript"]}})
        target = recipe.targets["cpu"]
        made = run_chain(recipe, Samples, Eager, Export)
        (template,) = Evaluate.configure(recipe, target)
        found = []
        for kind in ("reference", "torchscript")[:subjects]:
            inputs = {"samples": made["samples"], "subject": made[kind]}
            if found:
                inputs["baseline"] = found[0]
            found.append(run_stage(template.for_subject(kind, runner_for(kind, target)), inputs))
        return found

    return run


def metrics(artifact) -> dict:
    return json.loads((artifact.path / "metrics.json").read_text())


def test_the_recipes_metrics_keep_their_intervals_and_fidelity_stands_beside_them(scored) -> None:
    eager, program = scored("score")
    assert metrics(eager)["interval"] == {"value": 1.0, "low": 0.5, "high": 2.0, "n": 5}
    assert set(metrics(eager)) == {"mean", "interval"}
    assert metrics(program)["mean"] == metrics(eager)["mean"]
    assert metrics(program)["cosine"]["value"] == pytest.approx(1)
    assert metrics(program)["check_cosine"]["value"] == pytest.approx(1)
    assert metrics(program)["sqnr_db"]["value"] > 100
    assert program.meta["calls"] == 5
    assert program.meta["compared"] == 5


def test_eagers_outputs_are_kept_in_the_order_of_its_calls(scored) -> None:
    (eager,) = scored("score", subjects=1)
    rows = samples.load(eager.path / "outputs.safetensors")
    assert [row["y"].shape for row in rows] == [(2, 6, 8), (1, 1, 8), (3, 11, 8)] + [(1, 3, 8)] * 5


def test_without_an_evaluation_check_and_calibration_samples_are_compared(scored) -> None:
    eager, program = scored(None)
    assert metrics(eager) == {}
    assert program.meta["compared"] == 3 + 8
    assert metrics(program)["cosine"]["value"] == pytest.approx(1)
    assert "check_cosine" not in metrics(program)


def test_outputs_beyond_the_limit_are_counted_but_not_kept(scored, monkeypatch) -> None:
    monkeypatch.setattr(module, "RECORDED_BYTES", 2 * 3 * 8 * 4 + 1)
    _, program = scored("score")
    assert program.meta["calls"] == 5
    assert program.meta["compared"] == 2


@pytest.mark.parametrize(
    ("evaluation", "words"),
    [
        ("score_nan", ["metric 'accuracy' is nan"]),
        ("score_text", ["metric 'accuracy' is a str ('good'), not a number"]),
        ("score_nothing", ["returned a NoneType (None)", "{metric: number}"]),
        ("score_raises", ["KeyError: 'z'", "little_models.py:"]),
        ("score_own_cosine", ["metric 'cosine' is measured by vbpipe itself"]),
    ],
)
def test_an_evaluation_that_gives_no_numbers_is_refused(scored, evaluation, words) -> None:
    with pytest.raises(VbpipeError) as caught:
        scored(evaluation, subjects=1)
    for word in words:
        assert word in str(caught.value)


def test_a_call_with_wrong_inputs_names_the_line_that_made_it(scored) -> None:
    with pytest.raises(EngineError) as caught:
        scored("score_asks_wrongly", subjects=1)
    assert "input 'x' is float64; it takes float32" in str(caught.value)
    assert "little_models.py:" in str(caught.value)


def test_an_evaluation_that_asks_every_engine_something_else_is_refused(scored) -> None:
    with pytest.raises(VbpipeError, match=r"2 times for the torchscript and 1 times for eager"):
        scored("score_differently_each_time")


def test_the_key_follows_the_evaluations_source_and_the_backend_but_not_the_factory_of_an_engine(
    model_of, recipe_of, tmp_path
) -> None:
    (tmp_path / "little_models.py").write_text("def score(run):\n    return {'a': 1.0}\n")

    def key(factory: str, evaluation: str | None, runner: Runner) -> str:
        data = {"evaluation": f"little_models.py:{evaluation}"} if evaluation else {}
        recipe = recipe_of(model_of(factory), data=data)
        (stage,) = Evaluate.configure(recipe, recipe.targets["cpu"])
        return cache_key(stage.for_subject("onnx", runner), {}, tmp_path).digest

    ort = Runner(backend="onnxruntime")
    before = key("plain", "score", ort)
    assert before == key("other", "score", ort)
    assert before != key("plain", None, ort)
    assert before != key("plain", "score", Runner(backend="onnxruntime", threads=2))
    (tmp_path / "little_models.py").write_text("def score(run):\n    return {'a': 2.0}\n")
    assert before != key("plain", "score", ort)


def test_broken_outputs_are_refused_with_the_call_that_showed_them(scored) -> None:
    eager, _ = scored("score")
    rows = samples.load(eager.path / "outputs.safetensors")
    outputs = [dict(row) for row in rows[3:]]
    outputs[2]["y"] = outputs[2]["y"] * float("nan")
    with pytest.raises(VbpipeError, match="call 2: output 'y' holds 24 values that are NaN"):
        module._fidelity(outputs, rows[3:], "call")
