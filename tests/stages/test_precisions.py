"""Float types of 16 and 8 bits are written into the graph, stay near it, and are refused where nothing runs them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vbpipe import fidelity, samples
from vbpipe.core import Artifact, Site
from vbpipe.errors import EngineError, UsageError, VbpipeError
from vbpipe.recipe.model import Dimension, Recipe, Target, TensorInput
from vbpipe_stages import _processor
from vbpipe_stages._achieved import compare
from vbpipe_stages._damage import read_damage
from vbpipe_stages._half import in_half
from vbpipe_stages._interface import Interface
from vbpipe_stages._kernels import KERNELS, find_kernel
from vbpipe_stages._provenance import Provenance
from vbpipe_stages._simulate import has_half, in_float
from vbpipe_stages._watched import watched
from vbpipe_stages.backends.onnxruntime import OnnxRuntime
from vbpipe_stages.backends.tensorrt_rtx import TensorRtRtx
from vbpipe_stages.quantize import Quantize

WIDTH = 64
CHECKED = ("int8", "int4", "fp8", "fp16", "bf16")


@pytest.fixture
def source(tmp_path: Path) -> Artifact:
    """Write a layer norm, two products, a masked softmax and a guarded division."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("LayerNormalization", ["x", "gain", "shift"], ["n"], axis=-1),
        helper.make_node("MatMul", ["n", "up"], ["a"]),
        helper.make_node("Add", ["a", "up_bias"], ["b"]),
        helper.make_node("Gelu", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", "down"], ["d"]),
        helper.make_node("Add", ["d", "mask"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["s"]),
        helper.make_node("ReduceL2", ["d", "axes"], ["length"], keepdims=1),
        helper.make_node("Max", ["length", "epsilon"], ["guarded"]),
        helper.make_node("Div", ["d", "guarded"], ["unit"]),
        helper.make_node("Add", ["s", "unit"], ["y"]),
    ]
    mask = np.zeros(WIDTH, np.float32)
    mask[-8:] = np.finfo(np.float32).min
    weights = {
        "gain": np.ones(WIDTH, np.float32),
        "shift": np.zeros(WIDTH, np.float32),
        "up": rng.standard_normal((WIDTH, 2 * WIDTH)).astype(np.float32) / 8,
        "down": rng.standard_normal((2 * WIDTH, WIDTH)).astype(np.float32) / 11,
        "up_bias": rng.standard_normal(2 * WIDTH).astype(np.float32),
        "mask": mask,
        "axes": np.asarray([-1], np.int64),
        "epsilon": np.asarray(1e-12, np.float32),
    }
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", WIDTH])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    Interface(
        inputs={"x": TensorInput(dtype="float32", shape=("batch", WIDTH))},
        outputs=("y",),
        shapes={"batch": Dimension(min=1, opt=4, max=16)},
    ).write(folder)
    Provenance(
        nodes={"n": "norm", "a": "up", "b": "up", "c": "act", "d": "down", "s": "soft", "unit": "", "y": ""},
        classes={"norm": "LayerNorm", "up": "Linear", "down": "Linear", "act": "GELU", "soft": "Softmax"},
    ).write(folder)
    return Artifact("onnx", "0" * 64, folder, {})


def rows() -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    return [{"x": rng.standard_normal((1 + size, WIDTH)).astype(np.float32)} for size in range(6)]


def lowered(source: Artifact, tmp_path: Path, arch: str = "sm89", **options: Any) -> Artifact:
    data = tmp_path / "samples"
    data.mkdir(exist_ok=True)
    samples.save(data / "calibration.safetensors", rows())
    samples.save(data / "check.safetensors", rows()[:2])
    out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
    out.mkdir()
    given = {"onnx": source, "samples": Artifact("samples", "1" * 64, data, {})}
    step = Quantize.model_validate({"dialect": "tensorrt", "device": arch, **options})
    return Artifact("onnx", "2" * 64, out, step.run(given, out, Site(tmp_path, threads=2)))


def run(model: onnx.ModelProto, folder: Path) -> list[dict[str, Any]]:
    folder.mkdir()
    session = watched(model, [], folder, rewrite=False)
    return [{"y": session.run(["y"], row)[0]} for row in rows()]


def types_of(model: onnx.ModelProto) -> Mapping[str, int]:
    found = {v.name: v.type.tensor_type.elem_type for v in onnx.shape_inference.infer_shapes(model).graph.value_info}
    return {node.op_type: found.get(node.output[0], TensorProto.FLOAT) for node in model.graph.node}


@pytest.mark.parametrize(
    ("default", "told", "floor"),
    [
        ({"weight": "int8", "calibration": "minmax"}, "static int8 in fp16", 0.99),
        ({"weight": "int8", "calibration": "minmax", "high_precision": "bf16"}, "static int8 in bf16", 0.99),
        ({"weight": "int8", "calibration": "minmax", "high_precision": "fp32"}, "static int8", 0.99),
        ({"weight": "int8", "activation": "float"}, "weight_only int8 in fp16", 0.999),
        ({"weight": "int4", "group_size": 64}, "weight_only int4 in fp16", 0.98),
        ({"weight": "fp16"}, "fp16", 0.99999),
        ({"weight": "bf16"}, "bf16", 0.999),
        ({"weight": "fp8"}, "static fp8 in fp16", 0.99),
        ({"weight": "fp8", "activation": "bf16"}, "weight_only fp8 in bf16", 0.99),
    ],
)
def test_every_form_for_tensorrt_stays_close(
    default: dict[str, Any], told: str, floor: float, source: Artifact, tmp_path: Path
) -> None:
    made = lowered(source, tmp_path, default=default)
    assert made.meta["changed"] == {told: 2}
    assert made.meta["modules"] == {"up": told, "down": told}
    model, before = (onnx.load(one.path / "model.onnx") for one in (made, source))
    assert [value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)] == [1, 1]
    got, want = run(in_float(model)[0], tmp_path / "got"), run(before, tmp_path / "want")
    assert fidelity.compare(got, want).cosine_min >= floor


def test_norms_and_softmax_stay_in_float32_and_the_rest_does_not(source: Artifact, tmp_path: Path) -> None:
    made = lowered(source, tmp_path, default={"weight": "fp16"})
    types = types_of(onnx.load(made.path / "model.onnx"))
    assert {types[op] for op in ("LayerNormalization", "Softmax", "ReduceL2")} == {TensorProto.FLOAT}
    assert {types[op] for op in ("MatMul", "Gelu", "Div")} == {TensorProto.FLOAT16}


def test_what_fp16_can_not_hold_is_cut_and_told_or_stays(source: Artifact, tmp_path: Path) -> None:
    made = lowered(source, tmp_path, default={"weight": "fp16"})
    assert made.meta["cut_constants"] == {"mask": float(np.finfo(np.float32).min)}
    # An epsilon that fp16 rounds to zero guards nothing.
    assert types_of(onnx.load(made.path / "model.onnx"))["Max"] == TensorProto.FLOAT


def test_rules_give_modules_types_of_their_own(source: Artifact, tmp_path: Path) -> None:
    rules = [{"match": "up", "weight": "bf16"}, {"match": "down", "weight": "int8", "high_precision": "fp16"}]
    made = lowered(source, tmp_path, default="keep", rules=rules)
    assert made.meta["modules"] == {"up": "bf16", "down": "static int8 in fp16"}
    model = onnx.load(made.path / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    got, want = run(in_float(model)[0], tmp_path / "got"), run(onnx.load(source.path / "model.onnx"), tmp_path / "want")
    assert fidelity.compare(got, want).cosine_min >= 0.99


def test_a_rule_whose_nodes_all_stay_in_float32_says_so(source: Artifact, tmp_path: Path) -> None:
    with pytest.raises(
        VbpipeError, match=r"type=LayerNorm.*quantizes nothing.*Norms, softmax and sums stay in float32"
    ):
        lowered(source, tmp_path, default="keep", rules=[{"type": "LayerNorm", "weight": "fp16"}])


def test_scales_too_small_for_fp16_do_not_become_zero(source: Artifact, tmp_path: Path) -> None:
    model = onnx.load(source.path / "model.onnx")
    for tensor in model.graph.initializer:
        if tensor.name == "up":
            values = numpy_helper.to_array(tensor).copy()
            values[:, 0] = 1e-9
            tensor.CopyFrom(numpy_helper.from_array(values, "up"))
    (source.path / "model.onnx").write_bytes(model.SerializeToString())
    made = lowered(source, tmp_path, default={"weight": "int8", "calibration": "minmax"})
    scales = [t for t in onnx.load(made.path / "model.onnx").graph.initializer if "scale" in t.name]
    assert scales
    assert all((numpy_helper.to_array(scale) > 0).all() for scale in scales)


def test_a_module_s_own_error_is_as_large_in_half_types_as_in_float32(source: Artifact, tmp_path: Path) -> None:
    def own(high: str) -> float:
        default = {"weight": "int4", "group_size": 64, "high_precision": high}
        made = lowered(source, tmp_path, default=default)
        return next(one.own or 0.0 for one in read_damage(made.path) if one.module == "up")

    assert own("fp16") == pytest.approx(own("fp32"), rel=0.05)
    assert own("bf16") == pytest.approx(own("fp32"), rel=0.2)


def test_weights_beyond_fp16_keep_their_operator_in_float32(source: Artifact, tmp_path: Path) -> None:
    model = onnx.load(source.path / "model.onnx")
    for tensor in model.graph.initializer:
        if tensor.name == "up_bias":
            values = numpy_helper.to_array(tensor).copy()
            values[0] = 1e5
            tensor.CopyFrom(numpy_helper.from_array(values, "up_bias"))
    (source.path / "model.onnx").write_bytes(model.SerializeToString())
    made = lowered(source, tmp_path, default={"weight": "fp16"})
    assert set(made.meta["cut_constants"]) == {"mask"}
    held = {t.name: t.data_type for t in onnx.load(made.path / "model.onnx").graph.initializer}
    assert held["up_bias"] == TensorProto.FLOAT
    assert "up_bias__fp16" not in held


def test_a_graph_that_is_already_float_is_left_alone(source: Artifact) -> None:
    model = onnx.load(source.path / "model.onnx")
    assert in_half(model, {}).model is model
    assert not has_half(model)
    assert in_float(model) == (model, {})


@pytest.mark.parametrize("weight", CHECKED)
@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="needs: pip install tensorrt-rtx")
def test_the_tensorrt_form_parses_and_builds(weight: str, source: Artifact, tmp_path: Path) -> None:
    arch = "sm89" if weight == "fp8" else "sm86"
    made = lowered(source, tmp_path, arch, default={"weight": weight, "group_size": 64})
    out = tmp_path / "engine"
    out.mkdir()
    backend = TensorRtRtx(arch=arch)
    counted = backend.build(made, out, 1)["kinds"]
    assert sum(n for name, n in counted.items() if name.startswith("matrix_multiply")) == 2
    assert f"matrix_multiply {'bf16' if weight == 'bf16' else 'half'}" in counted
    assert counted.get("quantize", 0) == (2 if weight in ("int8", "fp8") else 0)
    assert counted.get("dequantize", 0) == {"int8": 4, "fp8": 4, "int4": 2}.get(weight, 0)
    assert backend.precisions(out) == {"up": (weight,), "down": (weight,)}
    assert compare(made.meta["modules"], backend.precisions(out)).missed == {}
    assert {"up", "down", "act"} <= {module for node in backend.nodes(out) for module in node.modules}


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="needs: pip install 'vbpipe[rtx]'")
def test_what_the_table_calls_absent_is_what_the_compiler_refuses(source: Artifact, tmp_path: Path) -> None:
    made = lowered(source, tmp_path, "sm89", default={"weight": "fp8"})
    out = tmp_path / "engine"
    out.mkdir()
    with pytest.raises(EngineError, match="fp8"):
        TensorRtRtx(arch="sm86").build(made, out, 1)


@pytest.mark.parametrize("weight", ["fp16", "bf16", "int8", "fp8"])
def test_a_graph_for_another_device_is_run_here_as_it_is_defined(weight: str, source: Artifact, tmp_path: Path) -> None:
    made = lowered(source, tmp_path, default={"weight": weight, "calibration": "minmax"})
    want = run(in_float(onnx.load(made.path / "model.onnx"))[0], tmp_path / "want")
    with OnnxRuntime(as_defined=True).open("onnx", made.path, 1) as opened:
        got = [opened(row) for row in rows()]
    assert fidelity.compare(got, want).max_abs == 0


@pytest.mark.parametrize(
    ("arch", "default", "instead"),
    [
        ("sm86", {"weight": "fp8"}, "weight: int8"),
        ("sm86", {"weight": "int8", "calibration": "dynamic"}, "calibration: minmax"),
        ("sm86", {"weight": "int8", "activation": "uint8"}, "activation: int8"),
        ("sm86", {"weight": "int8", "scheme": "asymmetric", "calibration": "minmax"}, "scheme: symmetric"),
        ("sm86", {"weight": "int4", "scheme": "asymmetric"}, "scheme: symmetric"),
        ("sm75", {"weight": "bf16"}, "weight: fp16"),
        ("sm75", {"weight": "int4"}, "weight: int8"),
    ],
)
def test_what_a_gpu_can_not_run_is_refused_with_the_nearest_form(
    arch: str, default: dict[str, Any], instead: str
) -> None:
    step = Quantize.model_validate({"dialect": "tensorrt", "device": arch, "default": {**default, "force": True}})
    with pytest.raises(UsageError, match=f"can't run on {arch}") as caught:
        step.refuse_impossible()
    assert instead in (caught.value.hint or "")


@pytest.mark.skipif(not _processor.is_x86(), reason="the table has these rows for x86")
@pytest.mark.parametrize(
    ("default", "said", "forced"),
    [
        ({"weight": "fp16"}, "gains nothing", True),
        ({"weight": "bf16"}, "can't run", False),
        ({"weight": "fp8"}, "is slow", True),
    ],
)
def test_what_this_processor_gains_nothing_from_is_refused_when_the_plan_is_made(
    default: dict[str, Any], said: str, forced: bool
) -> None:
    def configure(**options: Any) -> None:
        Quantize.configure(recipe({**default, **options}), Target(backend="onnxruntime"))

    with pytest.raises(UsageError, match=said):
        configure()
    if forced:
        configure(force=True)
    else:
        with pytest.raises(UsageError, match=said):
            configure(force=True)


def test_rules_that_fight_are_refused_when_the_plan_is_made() -> None:
    rules = [{"match": "*.attention", "keep": True}, {"match": "*.attention", "type": "Linear", "weight": "int8"}]
    with pytest.raises(UsageError, match=r"rules\[1\].*can never decide: rules\[0\]"):
        Quantize.model_validate({"rules": rules}).refuse_impossible()
    Quantize.model_validate({"rules": rules[::-1]}).refuse_impossible()


def test_every_row_of_the_table_of_kernels_can_be_found_and_says_what_to_do_instead() -> None:
    for row in KERNELS:
        assert row.source
        assert row.instead or row.speed == "fast"
        device, operator = (*row.devices, None)[0], (*row.operators, "MatMul")[0]
        found = find_kernel(row.dialect, device, operator, row.form)
        assert found is row


def recipe(default: dict[str, Any]) -> Recipe:
    model = {"factory": "m.py:f", "inputs": {"x": {"dtype": "float32", "shape": [1, 4]}}, "outputs": ["y"]}
    stages = {"quantize": {"default": default}}
    targets = {"cpu": {"backend": "onnxruntime"}}
    return Recipe.model_validate({"recipe": 1, "name": "r", "model": model, "targets": targets, "stages": stages})
