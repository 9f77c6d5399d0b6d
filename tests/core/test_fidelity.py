"""Closeness of outputs, the samples that it is judged on, and bundles' golden answers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vbpipe import fidelity, samples
from vbpipe.errors import BundleError
from vbpipe.recipe.model import Dimension, Model
from vbpipe.runner import Runner
from vbpipe.runtime import MANIFEST, Bundle, Claim, Golden, Manifest, check_files, read_manifest

MODEL = Model.model_validate({
    "factory": "net.py:build",
    "inputs": {"x": {"dtype": "float32", "shape": ["batch", "seq"]}, "n": {"dtype": "int64", "shape": ["batch"]}},
    "outputs": ["y"],
    "shapes": {"batch": {"min": 1, "opt": 2, "max": 8}, "seq": {"min": 4, "opt": 16, "max": 64}},
})  # fmt: skip


@given(st.floats(0.1, 10), st.integers(1, 5), st.integers(3, 9))
def test_equal_outputs_are_exact_and_scaled_ones_are_not(scale: float, rows: int, width: int) -> None:
    want = np.random.default_rng(0).standard_normal((rows, width)).astype("float32")
    same = fidelity.compare([{"y": want}], [{"y": want}])
    assert (same.cosine, same.max_abs, same.sqnr_db, same.top1_agreement) == (pytest.approx(1), 0, fidelity.EXACT_DB, 1)
    scaled = fidelity.compare([{"y": want * np.float32(scale)}], [{"y": want}])
    assert scaled.cosine == pytest.approx(1, abs=1e-6)
    assert scaled.sqnr_db == pytest.approx(-20 * np.log10(abs(1 - np.float32(scale)) + 1e-15), abs=0.5) or scale == 1


def test_an_output_without_rows_is_compared_without_an_error() -> None:
    empty = {"boxes": np.zeros((0, 4), "float32")}
    found = fidelity.compare([empty], [empty])
    assert (found.cosine, found.max_abs) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("got", "said"),
    [
        ({}, "is missing"),
        ({"y": np.zeros((2, 4), "float32")}, "has shape [2, 4]"),
        ({"y": np.zeros((2, 3), "float64")}, "is float64"),
        ({"y": np.full((2, 3), np.nan, "float32")}, "holds 6 values that are NaN"),
    ],
)
def test_outputs_that_can_not_be_compared_are_named(got: dict[str, np.ndarray], said: str) -> None:
    assert said in str(fidelity.broken(got, {"y": np.zeros((2, 3), "float32")}))


def test_a_value_that_is_not_finite_in_eager_either_is_no_fault() -> None:
    mask = np.array([[-np.inf, 1.0]], "float32")
    assert fidelity.broken({"y": mask}, {"y": mask}) is None
    assert fidelity.compare([{"y": mask}], [{"y": mask}]).cosine == 1.0


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4))
def test_check_sizes_lie_in_the_profile_and_are_three_where_it_holds_three(raw: list[tuple[int, int, int]]) -> None:
    shapes = {f"s{i}": Dimension(min=a, opt=a + b, max=a + b + c) for i, (a, b, c) in enumerate(raw)}
    sizes = samples.check_sizes(shapes)
    assert sizes[0] == {name: dim.opt for name, dim in shapes.items()}
    assert all(shapes[n].min <= size <= shapes[n].max for one in sizes for n, size in one.items())
    assert len({tuple(one.items()) for one in sizes}) == len(sizes)
    if any(dim.max - dim.min >= 3 for dim in shapes.values()):
        assert len(sizes) == 3


def test_symbols_of_one_profile_are_tried_at_different_sizes() -> None:
    same = Dimension(min=1, opt=8, max=64)
    assert any(one["a"] != one["b"] for one in samples.check_sizes({"a": same, "b": same}))


def test_made_up_samples_are_equal_for_equal_seeds_and_fit_the_model() -> None:
    one, other = (samples.synthesize(MODEL, {"batch": 2, "seq": 5}, seed) for seed in (1, 1))
    assert all((one[name] == other[name]).all() for name in one)
    assert samples.misfit(MODEL, one) is None
    assert "outside the profile" in str(samples.misfit(MODEL, samples.synthesize(MODEL, {"batch": 9, "seq": 5}, 0)))


def test_rows_of_samples_survive_a_file(tmp_path: Path) -> None:
    rows = [samples.synthesize(MODEL, {"batch": b, "seq": 4}, b) for b in (1, 2, 3)]
    samples.save(tmp_path / "s", rows)
    back = samples.load(tmp_path / "s")
    assert all((got[name] == row[name]).all() for got, row in zip(back, rows, strict=True) for name in row)


def bundle_in(folder: Path, answers: list[dict[str, np.ndarray]]) -> Bundle:
    asked = [{"x": np.ones((1, 2), "float32")} for _ in answers]
    samples.save(folder / "in", asked)
    samples.save(folder / "out", answers)
    data = {name: (folder / name).read_bytes() for name in ("in", "out")}
    files = {name: {"sha256": hashlib.sha256(b).hexdigest(), "size": len(b)} for name, b in data.items()}
    manifest = Manifest(
        manifest=1, name="n", variant="v", target="t", row="r", kind="engine", runner=Runner(backend="null"),
        engine="1", golden=Golden(inputs="in", outputs="out"), claim=Claim(), files=files,
    )  # fmt: skip
    (folder / MANIFEST).write_text(json.dumps(manifest.model_dump(mode="json")))
    return Bundle(folder, read_manifest(folder), lambda arrays: {"y": arrays["x"] * 2})


def test_a_bundle_that_answers_otherwise_or_not_at_all_is_refused(tmp_path: Path) -> None:
    right = {"y": np.full((1, 2), 2, "float32")}
    for name, answers in {"right": [right], "scaled": [{"y": right["y"] * 50}], "none": []}.items():
        (tmp_path / name).mkdir()
        bundle = bundle_in(tmp_path / name, answers)
        if name == "right":
            assert bundle.check_golden().max_abs == 0
        else:
            with pytest.raises(BundleError, match="golden outputs differ"):
                bundle.check_golden()


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../../up", "a//b", ".", "a\\b", ""])
def test_a_manifest_that_names_a_path_outside_is_refused(tmp_path: Path, path: str) -> None:
    bundle_in(tmp_path, [])
    body = json.loads((tmp_path / MANIFEST).read_text())
    body["files"][path] = {"sha256": "0" * 64, "size": 0}
    (tmp_path / MANIFEST).write_text(json.dumps(body))
    with pytest.raises(BundleError, match="manifest is damaged"):
        read_manifest(tmp_path)


def test_links_in_a_bundle_are_refused(tmp_path: Path) -> None:
    bundle = bundle_in(tmp_path, [])
    check_files(tmp_path, bundle.manifest)
    (tmp_path / "link").symlink_to("/etc/hostname")
    with pytest.raises(BundleError, match="holds a link"):
        check_files(tmp_path, bundle.manifest)
