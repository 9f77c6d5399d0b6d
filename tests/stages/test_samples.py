from __future__ import annotations

import json

import numpy as np
import pytest

from vbpipe import samples
from vbpipe.errors import VbpipeError
from vbpipe_stages.samples import Samples


@pytest.fixture
def collect(model_of, recipe_of, run_chain):
    def run(calibration: str | None, limit: int = 64):
        data = (
            {"samples": limit}
            if calibration is None
            else {"calibration": f"little_models.py:{calibration}", "samples": limit}
        )
        return run_chain(recipe_of(model_of("plain"), data=data), Samples)["samples"]

    return run


def test_check_samples_are_made_up_at_three_sizes_and_joined_by_four_real_ones(collect) -> None:
    made = collect("ragged")
    rows = samples.load(made.path / "check.safetensors")
    assert [row["x"].shape for row in rows] == [
        (2, 6, 4),
        (1, 1, 4),
        (3, 11, 4),
        (1, 2, 4),
        (2, 3, 4),
        (1, 4, 4),
        (2, 5, 4),
    ]
    described = json.loads((made.path / "sizes.json").read_text())["check"]
    assert [row["source"] for row in described] == ["made up"] * 3 + ["real"] * 4
    assert described[3]["sizes"] == {"batch": 1, "seq": 2}


def test_ragged_calibration_samples_are_kept_as_they_are(collect) -> None:
    made = collect("ragged")
    assert [row["x"].shape[1] for row in samples.load(made.path / "calibration.safetensors")] == [2, 3, 4, 5, 6, 7]
    assert made.meta["calibration"] == "real"
    assert made.meta["calibration_samples"] == 6


def test_without_a_calibration_function_samples_are_made_up_and_said_to_be(collect) -> None:
    made = collect(None)
    assert made.meta == {"check": 3, "check_real": 0, "calibration": "made up", "calibration_samples": 8}
    rows = samples.load(made.path / "calibration.safetensors")
    assert not np.array_equal(rows[0]["x"], rows[1]["x"])


def test_an_endless_generator_is_read_up_to_the_limit(collect) -> None:
    assert collect("endless", limit=5).meta["calibration_samples"] == 5


def test_torch_tensors_become_arrays(collect) -> None:
    rows = samples.load(collect("torch_samples").path / "calibration.safetensors")
    assert np.array_equal(rows[0]["x"], np.ones((2, 3, 4), np.float32))


def test_a_generator_that_fills_one_buffer_gives_different_samples(collect) -> None:
    rows = samples.load(collect("one_buffer").path / "calibration.safetensors")
    assert [float(row["x"].max()) for row in rows] == [0, 1, 2]


@pytest.mark.parametrize(
    ("calibration", "words"),
    [
        ("fails_late", ["RuntimeError: disk is gone", "little_models.py:"]),
        ("nothing", ["yields no sample"]),
        ("forgot_to_yield", ["returned a NoneType"]),
        ("tuples", ["sample 0", "is a tuple, not a mapping"]),
        ("wrong_dtype", ["sample 0", "x is float64; the recipe says float32"]),
        ("wrong_shape", ["axis 2 is 5, not 4"]),
        ("holds_nan", ["x holds NaN or infinity"]),
    ],
)
def test_samples_that_the_model_does_not_take_are_named(collect, calibration, words) -> None:
    with pytest.raises(VbpipeError) as caught:
        collect(calibration)
    for word in words:
        assert word in str(caught.value)


def test_equal_recipes_give_equal_bytes(collect) -> None:
    assert collect("ragged").digest == collect("ragged").digest


def test_the_factory_and_the_evaluation_are_no_part_of_the_configuration(model_of, recipe_of) -> None:
    one = recipe_of(model_of("plain"), data={"evaluation": "little_models.py:score"})
    other = recipe_of(model_of("branch", args={"depth": 2}))
    target = one.targets["cpu"]
    assert Samples.configure(one, target) == Samples.configure(other, target)
