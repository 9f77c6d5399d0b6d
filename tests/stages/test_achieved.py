"""What an engine computes in is compared with what was asked for, module by module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from vbpipe.core import Artifact, Site
from vbpipe.errors import VbpipeError
from vbpipe.recipe.model import TensorInput
from vbpipe_stages._achieved import compare
from vbpipe_stages._interface import Interface
from vbpipe_stages._provenance import Provenance
from vbpipe_stages.backends.onnxruntime import OnnxRuntime
from vbpipe_stages.build import Build

WIDTH = 32


def graph(folder: Path, *, weights_only: bool, asked: dict[str, str]) -> Artifact:
    """Write a product in float and one whose weight, or whose both sides, are kept in 8 bits behind Q/DQ nodes."""
    rng = np.random.default_rng(0)
    weight = rng.integers(-127, 128, (WIDTH, WIDTH), np.int8)
    nodes = [helper.make_node("MatMul", ["x", "plain"], ["a"])]
    if not weights_only:
        nodes += [helper.make_node("QuantizeLinear", ["a", "step", "zero"], ["q"])]
        nodes += [helper.make_node("DequantizeLinear", ["q", "step", "zero"], ["d"])]
    nodes += [helper.make_node("DequantizeLinear", ["eight", "steps", "zeros"], ["w"], axis=1)]
    nodes += [helper.make_node("MatMul", ["a" if weights_only else "d", "w"], ["y"])]
    constants: dict[str, Any] = {
        "plain": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32),
        "eight": weight,
        "steps": np.full(WIDTH, 0.01, np.float32),
        "zeros": np.zeros(WIDTH, np.int8),
        "step": np.asarray(0.1, np.float32),
        "zero": np.asarray(128, np.uint8),
    }
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, WIDTH]) for name in ("x", "y")]
    made = helper.make_graph(
        nodes, "g", ends[:1], ends[1:], [numpy_helper.from_array(value, name) for name, value in constants.items()]
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    folder.mkdir()
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    Interface(inputs={"x": TensorInput(dtype="float32", shape=(2, WIDTH))}, outputs=("y",)).write(folder)
    Provenance(nodes={"a": "first", "q": "second", "d": "second", "w": "second", "y": "second"}).write(folder)
    return Artifact("onnx", "0" * 64, folder, {"modules": asked})


def built(source: Artifact, out: Path) -> dict[str, Any]:
    out.mkdir()
    return dict(Build(backend="onnxruntime").run({"onnx": source}, out, Site(out)))


def test_products_of_eight_bits_are_found_in_the_optimized_engine(tmp_path: Path) -> None:
    meta = built(graph(tmp_path / "g", weights_only=False, asked={"second": "static int8"}), tmp_path / "e")
    assert meta["achieved"] == {"second": "int8"}
    assert meta["warning"] is None
    assert OnnxRuntime().precisions(tmp_path / "e") == {"first": ("float",), "second": ("int8",)}


def test_an_engine_that_computes_nothing_in_the_type_asked_for_is_a_failed_step(tmp_path: Path) -> None:
    source = graph(tmp_path / "g", weights_only=False, asked={"first": "static int8"})
    with pytest.raises(VbpipeError, match=r"first \(int8 asked, float\): quantizing had no effect"):
        built(source, tmp_path / "e")


def test_a_module_that_missed_its_type_is_named_while_others_have_theirs(tmp_path: Path) -> None:
    asked = {"first": "static int8", "second": "static int8"}
    meta = built(graph(tmp_path / "g", weights_only=False, asked=asked), tmp_path / "e")
    assert meta["missed"] == {"first": "float"}
    assert "1 of 2 quantized modules" in meta["warning"]
    assert "first" in meta["warning"]


def test_weights_that_are_turned_to_float_for_the_product_are_no_eight_bit_product(tmp_path: Path) -> None:
    folder = tmp_path / "g"
    graph(folder, weights_only=True, asked={})
    assert OnnxRuntime().precisions(folder)["second"] == ("int8 weights in float",)


def test_a_graph_that_was_not_quantized_is_not_looked_into(tmp_path: Path) -> None:
    assert "achieved" not in built(graph(tmp_path / "g", weights_only=False, asked={}), tmp_path / "e")


@pytest.mark.parametrize(
    ("form", "has", "missed"),
    [
        ("static int8", ("int8",), False),
        ("static int8 in fp16", ("int8", "fp16"), False),
        ("static int8 in fp16", ("fp16",), True),
        ("fp16", ("fp16",), False),
        ("weight_only int4", ("int8",), True),
        ("static int8; weight_only int4", ("int8", "int4"), False),
        ("static int8; weight_only int4", ("int4",), True),
        ("float", ("float",), False),
    ],
)
def test_the_type_of_weights_decides(form: str, has: tuple[str, ...], missed: bool) -> None:
    assert bool(compare({"m": form}, {"m": has}).missed) == missed


def test_a_module_that_the_engine_does_not_show_is_unknown_and_not_missed() -> None:
    found = compare({"m": "static int8"}, {})
    assert found.unknown == ("m",)
    assert not found.missed
    assert not found.nothing
