"""Quantization does what was asked, says what it did, and refuses what it can't do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from pydantic import ValidationError

from vbpipe import fidelity, plugins, samples
from vbpipe.core import Artifact, Site, cache_key
from vbpipe.errors import VbpipeError
from vbpipe.recipe.model import Dimension, Recipe, Target, TensorInput
from vbpipe_stages import _processor
from vbpipe_stages._calibration import Extent, Method, collect
from vbpipe_stages._damage import read_damage
from vbpipe_stages._interface import Interface
from vbpipe_stages._provenance import Provenance
from vbpipe_stages._quantize_rules import Described, Rule
from vbpipe_stages._quantize_weights import activation, blocks, symmetric_int8
from vbpipe_stages.quantize import Quantize

WIDTH = 64
Build = Callable[[Quantize], Artifact]


def layers(folder: Path, *, scale: float = 1.0, transposed: bool = False) -> Artifact:
    """Write x -> up -> Relu -> down (each MatMul and Add) with modules "block.up" and "block.down"."""
    rng = np.random.default_rng(0)
    up = (rng.standard_normal((WIDTH, 2 * WIDTH)) * scale / 8).astype(np.float32)
    down = (rng.standard_normal((2 * WIDTH, WIDTH)) / 11).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "up_turned" if transposed else "up"], ["a"]),
        helper.make_node("Add", ["a", "up_bias"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", "down"], ["d"]),
        helper.make_node("Add", ["d", "down_bias"], ["y"]),
    ]
    if transposed:
        nodes.insert(0, helper.make_node("Transpose", ["up"], ["up_turned"], perm=[1, 0]))
    weights = {
        "up": up.T if transposed else up,
        "down": down,
        "up_bias": rng.standard_normal(2 * WIDTH).astype(np.float32),
        "down_bias": rng.standard_normal(WIDTH).astype(np.float32),
    }
    provenance = Provenance(
        nodes={"a": "block.up", "b": "block.up", "c": "block", "d": "block.down", "y": "block.down"},
        classes={"block": "Block", "block.up": "Linear", "block.down": "Linear", "norm": "LayerNorm"},
    )
    return write(folder, nodes, weights, ["batch", "seq", WIDTH], ["batch", "seq", WIDTH], provenance)


def convolutions(folder: Path, *, tail: bool = True) -> Artifact:
    """Write a residual block: Conv, Relu, Conv, Add to the input's Conv, Relu, mean, Gemm."""
    rng = np.random.default_rng(1)
    nodes = [
        helper.make_node("Conv", ["x", "w0", "b0"], ["c0"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c0"], ["r0"]),
        helper.make_node("Conv", ["r0", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c1", "r0"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["r1"]),
        helper.make_node("Conv", ["r1", "w1", "b1"], ["c2"], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["c2"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["flat"]),
        helper.make_node("Gemm", ["flat", "head", "bias"], ["y"], transB=1),
    ]
    weights = {
        "w0": rng.standard_normal((16, 3, 3, 3)).astype(np.float32) / 5,
        "b0": rng.standard_normal(16).astype(np.float32),
        "w1": rng.standard_normal((16, 16, 3, 3)).astype(np.float32) / 12,
        "b1": rng.standard_normal(16).astype(np.float32),
        "head": rng.standard_normal((10, 16)).astype(np.float32),
        "bias": rng.standard_normal(10).astype(np.float32),
    }
    provenance = Provenance(
        nodes={"c0": "stem", "c1": "body.first", "sum": "body", "c2": "body.second", "y": "head"},
        classes={"stem": "Conv2d", "body.first": "Conv2d", "body.second": "Conv2d", "body": "Block", "head": "Linear"},
    )
    return write(folder, nodes, weights, ["batch", 3, 8, 8], ["batch", 10], provenance)


def write(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    weights: Mapping[str, Any],
    shape: list[Any],
    result: list[Any],
    provenance: Provenance,
) -> Artifact:
    folder.mkdir(parents=True)
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, result)],
        [numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    symbols = [size for size in shape if isinstance(size, str)]
    Interface(
        inputs={"x": TensorInput(dtype="float32", shape=tuple(shape))},
        outputs=("y",),
        shapes={symbol: Dimension(min=1, opt=4, max=64) for symbol in symbols},
    ).write(folder)
    provenance.write(folder)
    return Artifact("onnx", "0" * 64, folder, {})


def rows(shape: Sequence[int | None], count: int = 6) -> list[dict[str, Any]]:
    """Return samples of different sizes: None is a size that differs from row to row."""
    rng = np.random.default_rng(2)
    return [{"x": rng.standard_normal([size or 1 + row for size in shape]).astype(np.float32)} for row in range(count)]


RAGGED = rows([2, None, WIDTH])
IMAGES = rows([2, 3, 8, 8])


def calibrated(folder: Path, data: Sequence[Mapping[str, Any]]) -> Artifact:
    folder.mkdir(parents=True)
    samples.save(folder / "calibration.safetensors", data)
    samples.save(folder / "check.safetensors", data[:2])
    return Artifact("samples", "1" * 64, folder, {})


def stage(**options: Any) -> Quantize:
    return Quantize.model_validate({"dialect": "onnxruntime", "device": "processor", **options})


def quantized(step: Quantize, source: Artifact, tmp_path: Path, data: Sequence[Mapping[str, Any]] = RAGGED) -> Artifact:
    made = len(list(tmp_path.iterdir()))
    out = tmp_path / f"quantized{made}"
    out.mkdir()
    given_samples = calibrated(tmp_path / f"samples{made}", data)
    meta = step.run({"onnx": source, "samples": given_samples}, out, Site(tmp_path, threads=2))
    return Artifact("onnx", "2" * 64, out, meta)


def outputs(artifact: Artifact, data: Sequence[Mapping[str, Any]], backend: str = "onnxruntime") -> list[Any]:
    runner = plugins.backend(backend)()
    kind = "onnx" if backend == "onnxruntime" else "engine"
    with runner.open(kind, artifact.path, 1) as run:
        return [run(row) for row in data]


def cosine(one: Artifact, other: Artifact, data: Sequence[Mapping[str, Any]], backend: str = "onnxruntime") -> float:
    return fidelity.compare(outputs(one, data, backend), outputs(other, data)).cosine_min


def operators(artifact: Artifact) -> dict[str, int]:
    return dict(artifact.meta["operators"])


@pytest.mark.parametrize(
    ("default", "form", "floor"),
    [
        ({}, "dynamic int8", 0.999),
        ({"calibration": "minmax"}, "static int8", 0.999),
        ({"calibration": "entropy"}, "static int8", 0.99),
        ({"calibration": "percentile"}, "static int8", 0.999),
        ({"activation": "float"}, "weight_only int8", 0.9999),
        ({"weight": "int4"}, "weight_only int4", 0.98),
        ({"weight": "int4", "scheme": "asymmetric", "group_size": 16}, "weight_only int4", 0.98),
        ({"granularity": "per_tensor"}, "dynamic int8", 0.99),
        ({"reduce_range": True, "calibration": "minmax"}, "static int8", 0.99),
    ],
)
def test_every_form_quantizes_both_layers_and_stays_close(
    default: dict[str, Any], form: str, floor: float, tmp_path: Path
) -> None:
    source = layers(tmp_path / "source")
    made = quantized(stage(default=default), source, tmp_path)
    assert made.meta["changed"] == {form: 2}
    assert cosine(made, source, RAGGED) > floor


@pytest.mark.parametrize("default", [{}, {"calibration": "entropy"}, {"activation": "float"}, {"weight": "int4"}])
def test_a_target_without_contrib_operators_gets_standard_ones_that_give_the_same(
    default: dict[str, Any], tmp_path: Path
) -> None:
    source = layers(tmp_path / "source")
    made = quantized(stage(default=default, dialect="standard", device=None), source, tmp_path)
    assert all(":" not in name for name in operators(made))
    assert cosine(made, source, RAGGED, backend="null") > 0.98
    assert cosine(made, source, RAGGED) > 0.98


def test_a_transposed_weight_is_folded_and_quantized(tmp_path: Path) -> None:
    source = layers(tmp_path / "source", transposed=True)
    made = quantized(stage(), source, tmp_path)
    assert made.meta["changed"] == {"dynamic int8": 2}
    assert "Transpose" not in operators(made)
    assert cosine(made, source, RAGGED) > 0.999


def test_the_modules_that_bring_in_most_error_are_told_and_a_kept_one_is_not_among_them(tmp_path: Path) -> None:
    source = layers(tmp_path / "source")
    both = quantized(stage(default={"weight": "int4"}), source, tmp_path)
    assert both.meta["damage"].keys() == {"block.up", "block.down"}
    found = {one.module: one for one in read_damage(both.path)}
    assert list(found) == ["block.up", "block", "block.down"]
    assert found["block"].own == 0
    assert all(0.001 < share < 0.05 for share in both.meta["damage"].values())
    kept = [{"match": "block.up", "keep": True}]
    one = quantized(stage(default={"weight": "int4"}, rules=kept), source, tmp_path)
    assert one.meta["damage"].keys() == {"block.down"}
    assert read_damage(one.path)[-1].own == pytest.approx(found["block.down"].own)


def test_float_weights_are_gone_from_the_quantized_graph(tmp_path: Path) -> None:
    source = layers(tmp_path / "source")
    made = quantized(stage(default={"weight": "int4"}), source, tmp_path)
    assert (made.path / "model.onnx").stat().st_size < (source.path / "model.onnx").stat().st_size / 4


def test_convolutions_run_in_8_bits_once_built(tmp_path: Path) -> None:
    source = convolutions(tmp_path / "source")
    made = quantized(stage(default={"calibration": "minmax"}), source, tmp_path, IMAGES)
    out = tmp_path / "engine"
    out.mkdir()
    meta = plugins.backend("onnxruntime")().build(made, out, 1)
    assert made.meta["changed"] == {"static int8": 4}
    assert sum(count for name, count in meta["operators"].items() if name.endswith("QLinearConv")) == 3
    assert any(name.endswith("QGemm") for name in meta["operators"])
    assert cosine(made, source, IMAGES) > 0.99


def test_a_conv_is_static_where_nothing_says_how_to_calibrate(tmp_path: Path) -> None:
    made = quantized(stage(), convolutions(tmp_path / "source"), tmp_path, IMAGES)
    assert made.meta["changed"] == {"dynamic int8": 1, "static int8": 3}


def test_the_first_rule_that_meets_a_node_decides(tmp_path: Path) -> None:
    rules = [{"match": "*.up", "keep": True}, {"match": "block", "weight": "int4"}]
    made = quantized(stage(rules=rules), layers(tmp_path / "source"), tmp_path)
    assert made.meta["changed"] == {"weight_only int4": 1}
    asked = {entry["rule"]: entry["modules"] for entry in made.meta["asked"]}
    assert asked == {"match=*.up": [], "match=block": ["block.down"], "default": []}


def test_static_dynamic_int4_and_kept_layers_share_one_graph(tmp_path: Path) -> None:
    source = convolutions(tmp_path / "source")
    rules = [{"match": "body.first", "keep": True}, {"type": "Linear", "weight": "int4", "group_size": 16}]
    made = quantized(stage(rules=rules), source, tmp_path, IMAGES)
    assert made.meta["changed"] == {"static int8": 2, "weight_only int4": 1}
    assert cosine(made, source, IMAGES) > 0.98


def test_a_rule_on_an_operator_meets_it(tmp_path: Path) -> None:
    made = quantized(stage(rules=[{"op": "Gemm", "keep": True}]), convolutions(tmp_path / "s"), tmp_path, IMAGES)
    assert made.meta["changed"] == {"static int8": 3}


def test_a_rule_with_a_regular_expression_meets_whole_paths_and_what_is_inside_them(tmp_path: Path) -> None:
    found = [
        Described("t", path, ("Linear",), "MatMul")
        for path in ("layer.1.query", "layer.11.query", "layer.2.key", "layer.1.query.inner", "xlayer.1.query")
    ]
    rule = Rule(regex=r"layer\.\d\.(query|key)", keep=True)
    assert [rule.meets(node) for node in found] == [True, False, True, True, False]
    both = Rule(regex=r"layer\..*", op="Gemm", keep=True)
    assert not both.meets(found[0])
    assert rule.describe() == r"regex=layer\.\d\.(query|key)"


def test_a_rule_that_keeps_modules_without_weights_is_no_error(tmp_path: Path) -> None:
    made = quantized(stage(rules=[{"type": "LayerNorm", "keep": True}]), layers(tmp_path / "s"), tmp_path)
    assert made.meta["changed"] == {"dynamic int8": 2}


def test_a_rule_that_meets_nothing_names_near_modules(tmp_path: Path) -> None:
    with pytest.raises(VbpipeError, match=r"block\.upp.*block\.up") as caught:
        quantized(stage(rules=[{"match": "block.upp", "keep": True}]), layers(tmp_path / "s"), tmp_path)
    assert caught.value.where == "stages.quantize.rules[0]"


def test_a_rule_that_would_quantize_only_what_has_no_weight_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VbpipeError, match=r"quantizes nothing.*Relu"):
        quantized(stage(rules=[{"op": "Relu", "weight": "int8"}]), layers(tmp_path / "s"), tmp_path)


def test_keeping_everything_is_an_error_and_not_a_copy(tmp_path: Path) -> None:
    with pytest.raises(VbpipeError, match="nothing was quantized"):
        quantized(stage(rules=[{"match": "*", "keep": True}]), layers(tmp_path / "s"), tmp_path)


def test_int4_on_a_conv_names_the_module(tmp_path: Path) -> None:
    with pytest.raises(VbpipeError, match=r"stem \(Conv\)"):
        quantized(stage(rules=[{"match": "stem", "weight": "int4"}]), convolutions(tmp_path / "s"), tmp_path, IMAGES)


def test_a_group_size_that_does_not_divide_names_the_module(tmp_path: Path) -> None:
    with pytest.raises(VbpipeError, match=r"head \(Gemm\).*group_size 32.*16"):
        quantized(stage(rules=[{"match": "head", "weight": "int4"}]), convolutions(tmp_path / "s"), tmp_path, IMAGES)


def test_dynamic_convolutions_are_refused_with_the_better_form(tmp_path: Path) -> None:
    rules = [{"op": "Conv", "calibration": "dynamic"}]
    with pytest.raises(VbpipeError, match="calibration: minmax"):
        quantized(stage(rules=rules), convolutions(tmp_path / "s"), tmp_path, IMAGES)


def test_not_a_number_in_calibration_names_sample_and_module(tmp_path: Path) -> None:
    bad = [dict(row) for row in RAGGED]
    bad[3] = {"x": np.full_like(bad[3]["x"], np.nan)}
    with pytest.raises(VbpipeError, match=r"block\.up.*sample 3"):
        quantized(stage(default={"calibration": "minmax"}), layers(tmp_path / "s"), tmp_path, bad)


def test_samples_of_zeros_and_weights_of_zeros_give_finite_outputs(tmp_path: Path) -> None:
    source = layers(tmp_path / "s", scale=0.0)
    zeros = [{"x": np.zeros((1, 2, WIDTH), np.float32)}] * 2
    for default in ({"calibration": "entropy"}, {}, {"weight": "int4"}):
        made = quantized(stage(default=default), source, tmp_path, zeros)
        assert all(np.isfinite(row["y"]).all() for row in outputs(made, RAGGED))


def test_signed_activations_are_refused_where_they_are_slow_unless_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_processor, "kind", lambda: "x86_avx2")
    slow = {"activation": "int8", "calibration": "minmax"}
    with pytest.raises(VbpipeError, match="activation: uint8"):
        quantized(stage(default=slow), layers(tmp_path / "s"), tmp_path)
    made = quantized(stage(default={**slow, "force": True}), layers(tmp_path / "t"), tmp_path)
    assert made.meta["activations"] == ["int8"]


def test_signed_activations_are_taken_where_they_are_as_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_processor, "kind", lambda: "x86_vnni")
    made = quantized(stage(default={"activation": "int8", "calibration": "minmax"}), layers(tmp_path / "s"), tmp_path)
    assert made.meta["activations"] == ["int8"]


def test_the_same_input_gives_the_same_bytes_for_any_number_of_threads(tmp_path: Path) -> None:
    source, data = layers(tmp_path / "s"), calibrated(tmp_path / "samples", RAGGED)
    made = []
    for threads in (1, 3):
        out = tmp_path / f"out{threads}"
        out.mkdir()
        stage(default={"calibration": "entropy"}).run({"onnx": source, "samples": data}, out, Site(tmp_path, threads))
        made.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert made[0] == made[1]


def test_new_tensors_keep_the_module_that_they_belong_to(tmp_path: Path) -> None:
    made = quantized(stage(), layers(tmp_path / "s"), tmp_path)
    provenance = Provenance.read(made.path)
    model = onnx.load(str(made.path / "model.onnx"))
    of = {node.op_type: provenance.nodes[node.output[0]] for node in model.graph.node}
    assert of["MatMulInteger"] == "block.down"


def test_an_embedding_is_quantized_only_where_a_rule_names_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    table = rng.standard_normal((20, WIDTH)).astype(np.float32)
    nodes = [
        helper.make_node("Cast", ["x"], ["ids"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("MatMul", ["rows", "w"], ["y"]),
    ]
    weights = {"table": table, "w": rng.standard_normal((WIDTH, 8)).astype(np.float32)}
    provenance = Provenance(nodes={"rows": "embed", "y": "out"}, classes={"embed": "Embedding", "out": "Linear"})
    source = write(tmp_path / "s", nodes, weights, ["batch", "seq"], ["batch", "seq", 8], provenance)
    ids = [{"x": rng.integers(0, 20, (1, 5)).astype(np.float32)}]
    assert quantized(stage(), source, tmp_path, ids).meta["changed"] == {"dynamic int8": 1}
    both = quantized(stage(rules=[{"type": "Embedding", "weight": "int8"}]), source, tmp_path, ids)
    assert both.meta["changed"] == {"dynamic int8": 1, "table int8": 1}
    assert cosine(both, source, ids) > 0.999
    # Rows of fp16 are no form of their own: any rule that meets the module gives them.
    halved = stage(dialect="tensorrt", device="sm86", default="keep", rules=[{"match": "embed", "weight": "fp16"}])
    assert quantized(halved, source, tmp_path, ids).meta["modules"] == {"embed": "fp16", "out": "float"}


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"keep": True}, "one of match, regex, type, op"),
        ({"match": "a"}, "keep: true"),
        ({"match": "a", "keep": True, "weight": "int8"}, "exclude each other"),
        ({"match": "a", "wieght": "int8"}, "wieght"),
        ({"match": "", "keep": True}, "empty"),
    ],
)
def test_rules_that_make_no_sense_are_refused_when_read(rule: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        stage(rules=[rule])


def test_a_recipe_that_does_not_ask_for_it_gets_no_step() -> None:
    asking = recipe({"quantize": {"default": {"weight": "int4"}}})
    target = Target(backend="onnxruntime")
    assert Quantize.configure(recipe({}), target) == ()
    (step,) = Quantize.configure(asking, target)
    assert isinstance(step, Quantize) and step.dialect == "onnxruntime" and step.device == "processor"
    (elsewhere,) = Quantize.configure(asking, Target(backend="onnxruntime", options={"providers": ["cuda"]}))
    assert isinstance(elsewhere, Quantize) and elsewhere.device == "cuda"


def test_the_processor_is_in_the_key_only_where_it_matters(tmp_path: Path) -> None:
    assert "env.int8_kernels" in cache_key(stage(), {}, tmp_path).parts
    assert "env.int8_kernels" not in cache_key(stage(default={"weight": "int4"}), {}, tmp_path).parts


@given(st.integers(0, 2**32 - 1), st.sampled_from([4, 8]), st.booleans())
@settings(max_examples=25, deadline=None)
def test_rounding_groups_is_off_by_at_most_one_step(seed: int, bits: int, symmetric: bool) -> None:
    weight = np.random.default_rng(seed).standard_normal((64, 5)).astype(np.float32)
    rounded = blocks(weight, bits, 16, symmetric=symmetric)
    scale, zero = np.repeat(rounded.scale, 16, axis=0), np.repeat(rounded.zero_point, 16, axis=0)
    back = (rounded.values.astype(np.float64) - zero) * scale
    assert np.all(np.abs(back - weight) <= np.abs(scale) * 1.001)


@given(st.integers(0, 2**32 - 1), st.sampled_from([64, 127]))
@settings(max_examples=25, deadline=None)
def test_rounding_channels_is_off_by_at_most_half_a_step(seed: int, largest: int) -> None:
    weight = np.random.default_rng(seed).standard_normal((7, 9)).astype(np.float32)
    rounded = symmetric_int8(weight, 1, largest)
    assert np.abs(rounded.values).max() <= largest
    assert np.all(np.abs(rounded.values * rounded.scale - weight) <= rounded.scale * 0.5001)


@given(st.floats(-1e6, 0), st.floats(0, 1e6), st.sampled_from(["int8", "uint8"]), st.booleans())
def test_zero_is_exact_in_every_activation_scheme(low: float, high: float, dtype: str, symmetric: bool) -> None:
    scale, zero = activation(Extent(low, high), dtype, symmetric=symmetric)
    assert np.isfinite(scale) and scale > 0
    assert np.iinfo(dtype).min <= zero <= np.iinfo(dtype).max


def test_cutting_methods_leave_an_outlier_out_and_minmax_does_not(tmp_path: Path) -> None:
    source = layers(tmp_path / "s")
    model = onnx.load(str(source.path / "model.onnx"))
    data = [{"x": row["x"].copy()} for row in rows([4, None, WIDTH], 20)]
    data[0]["x"][0, 0, 0] = 1000.0
    found = {
        name: collect(model, {"x": Method(name)}, data, {}, Site(tmp_path))["x"].high
        for name in ("minmax", "percentile", "entropy")
    }
    assert found["minmax"] == 1000.0
    assert found["percentile"] < 100 and found["entropy"] < 100


def recipe(stages: dict[str, Any]) -> Recipe:
    return Recipe.model_validate(
        {
            "recipe": 1,
            "name": "r",
            "model": {
                "factory": "m.py:f",
                "inputs": {"x": {"dtype": "float32", "shape": [1, 4]}},
                "outputs": ["y"],
            },
            "targets": {"cpu": {"backend": "onnxruntime"}},
            "stages": stages,
        }
    )
