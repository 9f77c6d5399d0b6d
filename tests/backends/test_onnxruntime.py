"""What is ONNX Runtime's own: providers, links, and graphs that it can't run."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vbpipe import plugins
from vbpipe.core import Artifact, Measurable, Site
from vbpipe.errors import EngineError, UsageError, VbpipeError
from vbpipe.recipe.model import Recipe, Target
from vbpipe_stages import _product_rates
from vbpipe_stages._interface import Interface
from vbpipe_stages.backends.onnxruntime import OnnxRuntime
from vbpipe_stages.build import Build


def graph(folder: Path, op: str = "Relu", *, external: bool = False) -> Artifact:
    """Write y = op(x @ w)."""
    folder.mkdir()
    weight = np.eye(16, dtype=np.float32)
    made = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node(op, ["h"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 16])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    if external:
        onnx.save_model(
            model, str(folder / "model.onnx"), save_as_external_data=True, location="model.onnx.data", size_threshold=16
        )
    else:
        (folder / "model.onnx").write_bytes(model.SerializeToString())
    Interface.model_validate(
        {
            "inputs": {"x": {"dtype": "float32", "shape": ["batch", 16]}},
            "outputs": ["y"],
            "shapes": {"batch": {"min": 1, "opt": 2, "max": 8}},
        }
    ).write(folder)
    return Artifact("onnx", "0" * 64, folder, {})


X = {"x": np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)}


def absent_provider() -> str:
    import onnxruntime

    there = onnxruntime.get_available_providers()
    return next(name for name in ("CUDAExecutionProvider", "CoreMLExecutionProvider") if name not in there)


def test_a_provider_that_is_not_there_is_an_error_and_not_the_processor(tmp_path: Path) -> None:
    backend = OnnxRuntime(providers=(absent_provider(),))
    reason = backend.unavailable()
    assert reason is not None and absent_provider() in reason and "pip install" in reason
    source = graph(tmp_path / "source")
    with pytest.raises(EngineError, match=absent_provider()):
        backend.build(source, tmp_path, 1)
    with pytest.raises(EngineError, match=absent_provider()), backend.open("onnx", source.path, 1):
        pass


def test_short_names_are_those_of_onnxruntime() -> None:
    backend = OnnxRuntime.model_validate(
        {"providers": ["cuda", "cpu"], "provider_options": {"cuda": {"device_id": "0"}}}
    )
    assert backend.providers == ("CUDAExecutionProvider", "CPUExecutionProvider")
    assert backend.provider_options == {"CUDAExecutionProvider": {"device_id": "0"}}


def test_meta_names_the_providers_that_were_used(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    meta = OnnxRuntime().build(graph(tmp_path / "source"), out, 1)
    assert meta["providers"] == ["CPUExecutionProvider"]
    assert meta["nodes"] == sum(meta["operators"].values()) > 0


def test_an_operator_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="NoSuchOperator"):
        OnnxRuntime().build(graph(tmp_path / "source", "NoSuchOperator"), tmp_path, 1)


def test_weights_beside_the_graph_are_read_and_carried(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    OnnxRuntime().build(graph(tmp_path / "source", external=True), out, 1)
    (tmp_path / "source").rename(tmp_path / "gone")
    with OnnxRuntime().open("engine", out, 1) as run:
        np.testing.assert_allclose(run(X)["y"], np.maximum(X["x"], 0))


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_linked_weights_are_refused(link, tmp_path: Path) -> None:
    source = graph(tmp_path / "source", external=True)
    data = source.path / "model.onnx.data"
    elsewhere = data.rename(tmp_path / "elsewhere")
    link(elsewhere, data)
    for name in ("onnxruntime", "null"):
        with pytest.raises(EngineError, match="link"):
            plugins.backend(name)().build(source, tmp_path, 1)


def test_a_failing_run_is_an_engine_error(tmp_path: Path) -> None:
    source = graph(tmp_path / "source")
    Interface.model_validate(
        {"inputs": {"x": {"dtype": "float32", "shape": ["batch", "width"]}}, "outputs": ["y"], "shapes": {}}
    ).write(source.path)
    with (
        OnnxRuntime().open("onnx", source.path, 1) as run,
        pytest.raises(EngineError, match="ONNX Runtime failed"),
    ):
        run({"x": np.zeros((2, 3), np.float32)})


def test_build_reports_size_and_backend_and_refuses_what_is_not_available(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    source = graph(tmp_path / "source")
    meta = Build(backend="onnxruntime").run({"onnx": source}, out, Site(tmp_path))
    assert meta["backend"] == "onnxruntime"
    assert meta["size_bytes"] == sum(path.stat().st_size for path in out.iterdir())
    gone = Build(backend="onnxruntime", options={"providers": [absent_provider()]})
    with pytest.raises(VbpipeError, match=absent_provider()):
        gone.run({"onnx": source}, out, Site(tmp_path))
    with pytest.raises(UsageError, match="spining"):
        Build(backend="onnxruntime", options={"spining": True}).run({"onnx": source}, out, Site(tmp_path))


def test_build_reads_what_its_backend_reads_and_is_told_the_options() -> None:
    target = Target(backend="onnxruntime", options={"spinning": False})
    recipe = Recipe.model_validate(
        {
            "recipe": 1,
            "name": "r",
            "model": {"factory": "m.py:f", "inputs": {"x": {"dtype": "float32", "shape": [1]}}, "outputs": ["y"]},
            "targets": {"cpu": {"backend": "onnxruntime"}},
        }
    )
    (step,) = Build.configure(recipe, target)
    assert step.consumes() == {"onnx"}
    assert step.label() == "engine"
    assert Build(backend="torchscript").consumes() == {"torchscript"}


@pytest.mark.parametrize("threads", [1, 2])
def test_it_measures_the_rates_of_its_products(threads: int) -> None:
    backend = OnnxRuntime()
    assert isinstance(backend, Measurable)
    little = [_product_rates.Product(4, 16, 8), _product_rates.Product(2, 8, 8)]
    rates = _product_rates.best_rates(
        lambda path: backend._session(path, threads, optimize=True), little, seconds_each=0.0
    )
    assert rates.keys() == {"fp32", "int8_u8s8", "int8_s8s8"}
    assert all(rate > 0 for rate in rates.values())
