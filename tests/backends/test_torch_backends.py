"""What the two backends that run in PyTorch do beyond the shared contract."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from vbpipe.core import Artifact, Site
from vbpipe.errors import EngineError, UsageError
from vbpipe.recipe.model import Recipe, Target
from vbpipe.runner import Runner, configured, open_runner, runner_for
from vbpipe_stages._interface import Interface
from vbpipe_stages.backends.eager import Eager
from vbpipe_stages.backends.torchscript import TorchScript
from vbpipe_stages.eager import Eager as EagerStage
from vbpipe_stages.export import Export
from vbpipe_stages.samples import Samples

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, change_input):
        super().__init__()
        self.conv = nn.Conv1d(4, 6, 3, padding=1)
        self.norm = nn.BatchNorm1d(6)
        self.change_input = change_input

    def forward(self, x, scale):
        if self.change_input:
            x.mul_(2)
        return {"y": self.norm(self.conv(x)).transpose(1, 2) * scale, "count": torch.full((1,), 3)}


def build(change_input=False):
    return Net(change_input).eval()
"""


@pytest.fixture
def made(tmp_path: Path):
    """Return a function that makes artifacts of the model: kind to artifact."""
    (tmp_path / "model.py").write_text(MODEL)

    def make(**args: bool) -> dict[str, Artifact]:
        x = {"dtype": "float32", "shape": ["batch", 4, "seq"]}
        scale = {"dtype": "float32", "shape": [1]}
        shapes = {"batch": {"min": 1, "opt": 2, "max": 4}, "seq": {"min": 1, "opt": 5, "max": 9}}
        model = {"factory": "model.py:build", "args": args, "inputs": {"x": x, "scale": scale}}
        model |= {"outputs": ["y", "count"], "shapes": shapes}
        stages = {"export": {"formats": ["torchscript"]}}
        targets = {"cpu": {"backend": "torchscript"}}
        recipe = Recipe.model_validate(
            {"recipe": 1, "name": "net", "model": model, "targets": targets, "stages": stages}
        )
        found: dict[str, Artifact] = {}
        for cls in (Samples, EagerStage, Export):
            (stage,) = cls.configure(recipe, recipe.targets["cpu"])
            out = tmp_path / f"{len(list(tmp_path.iterdir()))}-{stage.label()}"
            out.mkdir()
            meta = stage.run({kind: found[kind] for kind in stage.consumes()}, out, Site(tmp_path))
            found[stage.produces()] = Artifact(stage.produces(), stage.label(), out, meta)
        return found

    return make


@pytest.fixture
def row() -> dict[str, np.ndarray]:
    return {"x": np.linspace(-1, 1, 3 * 4 * 7, dtype=np.float32).reshape(3, 4, 7), "scale": np.ones(1, np.float32)}


def built(backend, source: Artifact, out: Path) -> Artifact:
    out.mkdir()
    return Artifact("engine", "engine", out, backend.build(source, out, 1))


@pytest.mark.parametrize("optimize", [False, True])
def test_a_frozen_engine_agrees_with_eager_and_has_fewer_nodes(made, row, tmp_path, optimize) -> None:
    artifacts = made()
    backend = TorchScript(optimize=optimize)
    engine = built(backend, artifacts["torchscript"], tmp_path / "engine")
    with (
        backend.open("engine", engine.path, 1) as run,
        Eager().open("reference", artifacts["reference"].path, 1, tmp_path) as eager,
    ):
        got, want = run(row), eager(row)
    assert list(got) == list(want) == ["y", "count"]
    assert np.allclose(got["y"], want["y"], atol=1e-5)
    assert engine.meta["nodes"] < engine.meta["nodes_before"]


def test_an_eager_engine_opens_with_the_recipes_folder_and_not_without(made, row, tmp_path) -> None:
    engine = built(Eager(), made()["reference"], tmp_path / "engine")
    with Eager().open("engine", engine.path, 1, tmp_path) as run:
        assert run(row)["y"].shape == (3, 7, 6)
    with pytest.raises(EngineError, match="needs the recipe's folder"), Eager().open("engine", engine.path, 1):
        pass


def test_a_model_that_changes_its_input_is_given_copies(made, row, tmp_path) -> None:
    artifacts = made(change_input=True)
    before = row["x"].copy()
    for kind, backend in (("reference", Eager()), ("torchscript", TorchScript())):
        with backend.open(kind, artifacts[kind].path, 1, tmp_path) as run:
            first, second = run(row), run(row)
        assert np.array_equal(row["x"], before)
        assert np.array_equal(first["y"], second["y"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: row.pop("x"), "input 'x' is missing"),
        (lambda row: row.update(z=row["x"]), "there is no input 'z'"),
        (lambda row: row.update(x=row["x"].astype(np.float64)), "input 'x' is float64; it takes float32"),
        (lambda row: row.update(x=row["x"][0]), r"input 'x' has shape \[4, 7\]"),
        (lambda row: row.update(x=row["x"][:, :3]), "axis 1 is 3, not 4"),
        (
            lambda row: row.update(x=np.zeros((5, 4, 7), np.float32)),
            r"axis 0 is 5, outside the profile of batch \(1..4\)",
        ),
        (lambda row: row.update(x=[1.0]), "input 'x' is a list"),
    ],
)
def test_wrong_inputs_are_refused_by_name(made, row, tmp_path, change, words) -> None:
    artifacts = made()
    change(row)
    for kind, backend in (("reference", Eager()), ("torchscript", TorchScript())):
        with backend.open(kind, artifacts[kind].path, 1, tmp_path) as run, pytest.raises(EngineError, match=words):
            run(row)


def test_read_only_and_strided_arrays_are_taken(made, row, tmp_path) -> None:
    artifact = made()["torchscript"]
    with TorchScript().open("torchscript", artifact.path, 1) as run:
        expected = run(row)["y"]
        row["x"].flags.writeable = False
        assert np.array_equal(run(row)["y"], expected)
        flipped = {**row, "x": np.ascontiguousarray(row["x"][::-1])[::-1]}
        assert np.array_equal(run(flipped)["y"], expected)


def test_a_file_that_is_no_program_is_refused(made, tmp_path) -> None:
    artifact = made()["torchscript"]
    (artifact.path / "model.pt").write_bytes(b"PK\x03\x04 no program")
    with (
        pytest.raises(EngineError, match="no TorchScript program"),
        TorchScript().open("torchscript", artifact.path, 1),
    ):
        pass
    with pytest.raises(EngineError, match="no TorchScript program"):
        built(TorchScript(), artifact, tmp_path / "engine")


def test_another_kind_is_refused(made) -> None:
    path = made()["torchscript"].path
    with pytest.raises(EngineError, match="does not run 'onnx'"), TorchScript().open("onnx", path, 1):
        pass


def test_a_missing_interface_is_refused(made) -> None:
    path = made()["torchscript"].path
    (path / "io.json").unlink()
    words = "does not say what the artifact takes"
    with pytest.raises(EngineError, match=words), TorchScript().open("torchscript", path, 1):
        pass


def test_threads_hold_while_it_is_open_and_go_back_after(made, tmp_path) -> None:
    artifact = made()["torchscript"]
    before = torch.get_num_threads()
    with TorchScript().open("torchscript", artifact.path, before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_a_target_runs_each_kind_on_its_own_backend_where_it_can() -> None:
    target = Target(backend="torchscript", threads=2, options={"optimize": True})
    assert runner_for("reference", target) == Runner(backend="eager", threads=2)
    assert runner_for("torchscript", target) == Runner(backend="torchscript", options={"optimize": True}, threads=2)
    assert runner_for("onnx", target) == Runner(backend="onnxruntime", threads=2)
    assert runner_for("engine", target).backend == "torchscript"
    with pytest.raises(UsageError, match="does not run 'bundle'"):
        runner_for("bundle", target)


def test_unknown_backend_options_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="optimise"):
        configured(Runner(backend="torchscript", options={"optimise": True}))


def test_the_interface_survives_a_round_trip_in_order(made, tmp_path) -> None:
    interface = Interface.read(made()["torchscript"].path)
    assert list(interface.inputs) == ["x", "scale"]
    interface.write(tmp_path)
    assert Interface.read(tmp_path) == interface


def test_opening_through_a_runner_gives_the_same_outputs(made, row) -> None:
    artifact = made()["torchscript"]
    with open_runner(Runner(backend="torchscript"), "torchscript", artifact.path) as run:
        assert run(row)["count"].tolist() == [3]
