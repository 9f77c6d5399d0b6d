"""Run stages one after another, as a build does, without a store."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from vbpipe.core import Artifact, Inputs, Site, Stage
from vbpipe.recipe.model import Model, Recipe

HERE = Path(__file__).parent


@pytest.fixture
def model_of() -> Callable[..., Model]:
    """Return a maker of models: a factory of little_models.py, with one input x [batch, seq, 4] where not changed."""

    def make(factory: str, **changes: Any) -> Model:
        plain: dict[str, Any] = {
            "factory": f"little_models.py:{factory}",
            "inputs": {"x": {"dtype": "float32", "shape": ["batch", "seq", 4]}},
            "outputs": ["y"],
            "shapes": {"batch": {"min": 1, "opt": 2, "max": 8}, "seq": {"min": 1, "opt": 6, "max": 16}},
        }
        return Model.model_validate({**plain, **changes})

    return make


@pytest.fixture
def recipe_of() -> Callable[..., Recipe]:
    """Return a maker of recipes around a model."""

    def make(model: Model, **parts: Any) -> Recipe:
        parts = {"targets": {"cpu": {"backend": "onnxruntime"}}, **parts}
        return Recipe.model_validate({"recipe": 1, "name": "little", "model": model.model_dump(), **parts})

    return make


@pytest.fixture
def run_stage(tmp_path: Path) -> Callable[..., Artifact]:
    """Return a runner of one stage; the recipe's folder is this one."""

    def run(stage: Stage, inputs: Inputs | None = None, root: Path = HERE) -> Artifact:
        out = tmp_path / f"{len(list(tmp_path.iterdir())):03d}-{stage.label()}"
        out.mkdir()
        meta = stage.run(inputs or {}, out, Site(root))
        return Artifact(stage.produces(), digest_of(out), out, meta)

    return run


@pytest.fixture
def run_chain(run_stage: Callable[..., Artifact]) -> Callable[..., Mapping[str, Artifact]]:
    """Return a runner of stages in a row, each configured from one recipe: kind to newest artifact."""

    def run(recipe: Recipe, *stages: type[Stage]) -> Mapping[str, Artifact]:
        made: dict[str, Artifact] = {}
        target = next(iter(recipe.targets.values()))
        for cls in stages:
            for stage in cls.configure(recipe, target):
                artifact = run_stage(stage, {kind: made[kind] for kind in stage.consumes()})
                made[artifact.kind] = artifact
        return made

    return run


def digest_of(folder: Path) -> str:
    """Return the sha256 over names and bytes of all files."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
