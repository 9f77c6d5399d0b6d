"""Every backend that is installed meets the contract."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from vbpipe import plugins, samples
from vbpipe.core import Artifact, Site
from vbpipe.recipe.model import Model, Recipe

HERE = Path(__file__).parent


def _load(name: str) -> ModuleType:
    """Import a file beside this one: tests are no package."""
    spec = importlib.util.spec_from_file_location(f"vbpipe_test_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


contract = _load("contract")

MODEL = Model.model_validate(
    {
        "factory": "contract_model.py:build",
        "inputs": {
            "tokens": {"dtype": "int64", "shape": ["batch", "seq"], "values": {"low": 0, "high": 10}},
            "weights": {"dtype": "float32", "shape": ["batch", "seq"]},
        },
        "outputs": ["scores", "pooled"],
        "shapes": {"batch": {"min": 1, "opt": 2, "max": 4}, "seq": {"min": 1, "opt": 5, "max": 12}},
    }
)


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    """Return kind to artifact, made by the real stages."""
    recipe = Recipe(
        recipe=1,
        name="contract",
        model=MODEL,
        data={"calibration": "contract_model.py:calibration"},
        targets={"here": {"backend": "onnxruntime"}},
    )
    made: dict[str, Artifact] = {}
    for name in ("samples", "eager", "export"):
        for stage in plugins.stage(name).configure(recipe, recipe.targets["here"]):
            out = tmp_path_factory.mktemp(stage.label())
            meta = stage.run({kind: made[kind] for kind in stage.consumes()}, out, Site(HERE))
            made[stage.produces()] = Artifact(stage.produces(), stage.label(), out, meta)
    return made


@pytest.mark.parametrize("name", sorted(plugins.names("backends")))
class TestEveryBackend(contract.BackendContract):  # type: ignore[misc,name-defined]  # loaded from a file
    @pytest.fixture
    def subject(self, name: str, artifacts: dict[str, Artifact]):
        backend = plugins.backend(name)()
        reason = backend.unavailable()
        assert reason is None or (isinstance(reason, str) and reason)
        if reason:
            pytest.skip(reason)
        rows = samples.load(artifacts["samples"].path / "check.safetensors")
        expected = samples.load(artifacts["reference"].path / "reference.safetensors")
        return contract.Subject(backend, artifacts[backend.source], HERE, MODEL, tuple(rows), tuple(expected))
