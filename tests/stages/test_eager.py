from __future__ import annotations

import json

import numpy as np
import pytest

from vbpipe import samples
from vbpipe.errors import VbpipeError
from vbpipe_stages._reference import Reference
from vbpipe_stages.eager import Eager
from vbpipe_stages.samples import Samples


@pytest.fixture
def reference(model_of, recipe_of, run_chain):
    def run(factory: str, **changes):
        return run_chain(recipe_of(model_of(factory, **changes)), Samples, Eager)["reference"]

    return run


NESTED = {
    "inputs": {
        name: {"dtype": "float32", "shape": ["batch", 4]} for name in ("x", "state.h", "state.c", "past.0", "past.1")
    },
    "outputs": ["y", "h", "c"],
    "shapes": {"batch": {"min": 1, "opt": 2, "max": 4}},
}


def test_the_reference_holds_outputs_weights_digest_and_a_module_table(reference) -> None:
    made = reference("plain")
    rows = samples.load(made.path / "reference.safetensors")
    assert [row["y"].shape for row in rows] == [(2, 6, 8), (1, 1, 8), (3, 11, 8)]
    facts = json.loads((made.path / "model.json").read_text())
    assert facts["parameters"] == 40 + 16 + 2 * 72
    assert {"path": "layers.1", "type": "Linear", "parameters": 72} in facts["modules"]
    assert facts["output_dtypes"] == {"y": "float32"}
    assert len(facts["weights_sha256"]) == 64


def test_the_model_runs_in_eval_mode_and_the_fix_is_told(reference) -> None:
    made = reference("train_mode", inputs={"x": {"dtype": "float32", "shape": ["batch", 4]}})
    assert made.meta["train_mode_fixed"] is True
    assert made.meta["deterministic"] is True
    assert any("train mode" in note for note in made.meta["notes"])
    assert reference("plain").meta["train_mode_fixed"] is False


def test_nested_names_reach_keyword_arguments_and_nested_outputs_come_in_order(reference) -> None:
    made = reference("nested", **NESTED)
    rows = Reference.read(made.path).expected(made.path)
    assert list(rows[0]) == ["y", "h", "c"]
    assert np.allclose(rows[0]["h"], rows[0]["y"] + 1)


def test_dataclass_outputs_are_matched_by_name_where_names_are_keys(reference) -> None:
    made = reference("by_key", outputs=["hidden", "logits"])
    row = Reference.read(made.path).expected(made.path)[0]
    single = Reference.read(reference("by_key", outputs=["hidden"]).path)
    assert not np.allclose(row["hidden"], row["logits"])
    assert single.output_dtypes == {"hidden": "float32"}


def test_weights_drawn_from_the_global_generator_are_the_same_each_time(reference) -> None:
    assert reference("plain").digest == reference("plain").digest


def test_a_model_that_is_not_deterministic_is_told(reference) -> None:
    made = reference("random")
    assert made.meta["deterministic"] is False
    assert any("not deterministic" in note for note in made.meta["notes"])


def test_inputs_changed_in_place_are_told(reference) -> None:
    made = reference("in_place")
    assert Reference.read(made.path).changes_inputs == ("x",)


@pytest.mark.parametrize(
    ("factory", "changes", "words"),
    [
        ("nan_weight", {}, ["layers.1.weight holds NaN"]),
        ("the_class", {}, ["returned the class Plain", "instance"]),
        ("state_dict", {}, ["returned a OrderedDict"]),
        ("raises", {}, ["KeyError", "no checkpoint", "little_models.py:"]),
        ("on_meta", {}, ["parameter weight is on meta"]),
        ("plain", {"args": {"depth": 3}}, ["TypeError", "depth"]),
        ("not_only_tensors", {}, ["returned a str at [1], not a tensor"]),
        ("plain", {"outputs": ["y", "z"]}, ["returned 1 tensors (a tensor float32 [2, 6, 8])", "names 2: y, z"]),
        ("nested", {}, ["requires 'state'"]),
        ("bfloat16", {}, ["output 'y' is bfloat16", ".float()"]),
        ("gives_nan", {}, ["output 'y' holds 48 of 48 values", "batch=2,seq=6"]),
    ],
)
def test_a_model_that_can_not_be_used_is_refused_by_name(reference, factory, changes, words) -> None:
    with pytest.raises(VbpipeError) as caught:
        reference(factory, **changes)
    for word in words:
        assert word in str(caught.value)


def test_an_input_smaller_than_a_window_points_to_the_minimum_of_the_profile(reference) -> None:
    with pytest.raises(VbpipeError) as caught:
        reference("window")
    assert "batch=1,seq=1" in str(caught.value)
    assert "`shapes.seq.min`" in str(caught.value)


def test_a_dimension_that_does_not_fit_the_weights_points_to_the_inputs(reference) -> None:
    with pytest.raises(VbpipeError) as caught:
        reference("plain", inputs={"x": {"dtype": "float32", "shape": ["batch", 5]}})
    assert "model.inputs" in str(caught.value)
    assert "little_models.py:" in str(caught.value)
