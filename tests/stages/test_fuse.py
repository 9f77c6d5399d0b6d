"""Fusing changes the graph, never its outputs, and says what each pass did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vbpipe import fidelity, plugins, samples
from vbpipe.core import Artifact, Site
from vbpipe.errors import VbpipeError
from vbpipe.recipe.model import Model, Recipe, Target
from vbpipe_stages import _fuse_passes, fuse
from vbpipe_stages._interface import Interface
from vbpipe_stages._provenance import Provenance
from vbpipe_stages.fuse import Fuse
from vbpipe_stages.quantize import Quantize

ATTENTION = {
    "factory": "attention_model.py:build",
    "inputs": {"x": {"dtype": "float32", "shape": ["batch", "seq", 32]}},
    "outputs": ["y"],
    "shapes": {"batch": {"min": 1, "opt": 2, "max": 8}, "seq": {"min": 2, "opt": 6, "max": 32}},
}
CODE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.norm, self.last = nn.LayerNorm(32), nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def heads(self, x):
        return x.view(x.shape[0], x.shape[1], 4, 8).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.heads(self.query(x)), self.heads(self.key(x)), self.heads(self.value(x))
        a = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = self.norm(x + self.out(a))
        return self.last(x + self.down(nn.functional.gelu(self.up(x))))


def build():
    torch.manual_seed(0)
    return Block().eval()
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Artifact]:
    """Return an attention block as the export stage writes it, with its samples and eager's outputs."""
    root = tmp_path_factory.mktemp("recipe")
    (root / "attention_model.py").write_text(CODE, encoding="utf-8")
    made: dict[str, Artifact] = {}
    asked = recipe({"export": {"formats": ["onnx"]}})
    for name in ("samples", "eager", "export"):
        for step in plugins.stage(name).configure(asked, asked.targets["cpu"]):
            out = tmp_path_factory.mktemp(name)
            meta = step.run({kind: made[kind] for kind in step.consumes()}, out, Site(root))
            made[step.produces()] = Artifact(step.produces(), name, out, meta)
    return made


def recipe(stages: dict[str, Any], backend: str = "onnxruntime") -> Recipe:
    return Recipe(
        recipe=1,
        name="attention",
        model=Model.model_validate(ATTENTION),
        targets={"cpu": Target(backend=backend)},
        stages=stages,
    )


def fused(step: Fuse, source: Artifact, tmp_path: Path) -> Artifact:
    out = tmp_path / f"fused{len(list(tmp_path.iterdir()))}"
    out.mkdir()
    return Artifact("onnx", "f" * 64, out, step.run({"onnx": source}, out, Site(tmp_path)))


def fidelity_to_eager(artifact: Artifact, exported: Mapping[str, Artifact]) -> fidelity.Fidelity:
    rows = samples.load(exported["samples"].path / "check.safetensors")
    expected = samples.load(exported["reference"].path / "reference.safetensors")
    with plugins.backend("onnxruntime")().open("onnx", artifact.path, 1) as run:
        return fidelity.compare([run(row) for row in rows], expected)


def test_attention_norms_and_activation_fuse_and_outputs_stay(exported: Mapping[str, Artifact], tmp_path: Path) -> None:
    made = fused(Fuse(contrib=True), exported["onnx"], tmp_path)
    told = {one["name"]: (one["fused"], one["found"]) for one in made.meta["patterns"]}
    assert told["attention"] == (1, 1)
    assert told["skip_norm"] == (2, 2)
    assert made.meta["warning"] is None
    assert made.meta["fused"]["com.microsoft:MultiHeadAttention"] == 1
    assert made.meta["fused"]["com.microsoft:SkipLayerNormalization"] == 2
    assert made.meta["effect"] == "changed"
    assert fidelity_to_eager(made, exported).max_relative < 1e-4


def test_packed_attention_merges_the_three_weights(exported: Mapping[str, Artifact], tmp_path: Path) -> None:
    made = fused(Fuse(contrib=True, pack_attention=True), exported["onnx"], tmp_path)
    assert made.meta["fused"]["com.microsoft:Attention"] == 1
    assert fidelity_to_eager(made, exported).max_relative < 1e-4


def test_without_contrib_only_standard_operators_are_written(exported: Mapping[str, Artifact], tmp_path: Path) -> None:
    made = fused(Fuse(contrib=False), exported["onnx"], tmp_path)
    model = onnx.load(str(made.path / "model.onnx"))
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
    assert fidelity_to_eager(made, exported).max_relative < 1e-4


@pytest.mark.parametrize("level", ["basic", "extended"])
def test_a_lower_level_does_less(level: Any, exported: Mapping[str, Artifact], tmp_path: Path) -> None:
    made = fused(Fuse(contrib=True, level=level), exported["onnx"], tmp_path)
    assert {report["name"] for report in made.meta["passes"]} == {"fold", "onnxruntime"}
    assert "com.microsoft:MultiHeadAttention" not in made.meta["fused"]


def test_names_and_interface_stay(exported: Mapping[str, Artifact], tmp_path: Path) -> None:
    made = fused(Fuse(contrib=True), exported["onnx"], tmp_path)
    model = onnx.load(str(made.path / "model.onnx"))
    assert [value.name for value in model.graph.input] == ["x"]
    assert [value.name for value in model.graph.output] == ["y"]
    assert Interface.read(made.path) == Interface.read(exported["onnx"].path)


def test_fused_nodes_keep_the_module_that_they_compute(exported: Mapping[str, Artifact], tmp_path: Path) -> None:
    made = fused(Fuse(contrib=True), exported["onnx"], tmp_path)
    known = Provenance.read(made.path).nodes
    model = onnx.load(str(made.path / "model.onnx"))
    modules = {known[node.output[0]] for node in model.graph.node if node.op_type == "MatMul"}
    assert modules == {"query", "key", "value", "out", "up", "down"}


def test_quantization_still_finds_every_layer_after_fusion(exported: Mapping[str, Artifact], tmp_path: Path) -> None:
    source = fused(Fuse(contrib=True), exported["onnx"], tmp_path)
    for default in ({}, {"calibration": "minmax"}, {"weight": "int4"}):
        out = tmp_path / f"quantized{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        step = Quantize.model_validate({"dialect": "onnxruntime", "default": default})
        meta = step.run({"onnx": source, "samples": exported["samples"]}, out, Site(tmp_path))
        assert meta["quantized_nodes"] == 6
        assert fidelity_to_eager(Artifact("onnx", "", out, meta), exported).cosine > 0.97


def test_the_same_graph_gives_the_same_bytes(exported: Mapping[str, Artifact], tmp_path: Path) -> None:
    one, other = (fused(Fuse(contrib=True), exported["onnx"], tmp_path) for _ in range(2))
    for path in one.path.iterdir():
        assert path.read_bytes() == (other.path / path.name).read_bytes()


def test_a_step_that_finds_nothing_says_so(tmp_path: Path) -> None:
    made = fused(Fuse(contrib=True), tiny(tmp_path / "source"), tmp_path)
    assert made.meta["effect"] == "none"
    assert all(report["reason"] for report in made.meta["passes"])


def test_a_pass_that_changes_the_outputs_is_left_out_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def negate(model: onnx.ModelProto, setting: _fuse_passes.Setting) -> onnx.ModelProto:
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        changed.graph.node[-1].output[0] = "turned"
        changed.graph.node.append(helper.make_node("Neg", ["turned"], ["y"]))
        return changed

    assert_left_out(negate, "differ", tmp_path, monkeypatch)


def test_a_pass_that_writes_an_invalid_graph_is_left_out_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unplug(model: onnx.ModelProto, setting: _fuse_passes.Setting) -> onnx.ModelProto:
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        changed.graph.node.append(helper.make_node("Relu", ["nowhere"], ["z"]))
        return changed

    assert_left_out(unplug, "nowhere", tmp_path, monkeypatch)


def test_a_pass_that_raises_is_left_out_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: onnx.ModelProto, setting: _fuse_passes.Setting) -> onnx.ModelProto:
        raise KeyError("no such pattern")

    assert_left_out(fail, "no such pattern", tmp_path, monkeypatch)


def assert_left_out(
    rewrite: Callable[..., onnx.ModelProto], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny(tmp_path / "source")
    monkeypatch.setattr(fuse, "PASSES", (_fuse_passes.Pass("fold", "basic", contrib=False, apply=rewrite),))
    made = fused(Fuse(), source, tmp_path)
    (report,) = made.meta["passes"]
    assert said in report["reason"] and not report["changed"]
    before, after = (onnx.load(str(folder / "model.onnx")) for folder in (source.path, made.path))
    assert list(after.graph.node) == list(before.graph.node)


def test_a_graph_that_does_not_run_is_an_error(tmp_path: Path) -> None:
    source = tiny(tmp_path / "source")
    model = onnx.load(str(source.path / "model.onnx"))
    model.graph.node[0].op_type = "NoSuchOperator"
    (source.path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(VbpipeError, match="NoSuchOperator"):
        fused(Fuse(), source, tmp_path)


def test_the_target_decides_what_may_be_fused() -> None:
    (own,) = Fuse.configure(recipe({}), Target(backend="onnxruntime"))
    (plain,) = Fuse.configure(recipe({"quantize": {}}), Target(backend="null"))
    assert isinstance(own, Fuse) and own.contrib and own.pack_attention
    assert isinstance(plain, Fuse) and not plain.contrib and not plain.pack_attention
    assert Fuse.configure(recipe({"fuse": {"level": "none"}}), Target(backend="onnxruntime")) == ()
    assert Fuse.configure(recipe({}), Target(backend="torchscript")) == ()


def tiny(folder: Path) -> Artifact:
    """Write y = relu(x + 1), which nothing can improve."""
    folder.mkdir()
    shape = ["batch", 4]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "one"], ["s"]), helper.make_node("Relu", ["s"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.ones(4, np.float32), "one")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    Interface.model_validate(
        {
            "inputs": {"x": {"dtype": "float32", "shape": ["batch", 4]}},
            "outputs": ["y"],
            "shapes": {"batch": {"min": 1, "opt": 2, "max": 8}},
        }
    ).write(folder)
    return Artifact("onnx", "0" * 64, folder, {})
