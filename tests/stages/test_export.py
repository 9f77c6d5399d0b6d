from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from vbpipe import samples
from vbpipe.errors import VbpipeError
from vbpipe.runner import Runner, open_runner
from vbpipe_stages import _to_onnx
from vbpipe_stages._interface import Interface
from vbpipe_stages._provenance import Provenance
from vbpipe_stages.eager import Eager
from vbpipe_stages.export import Export
from vbpipe_stages.samples import Samples

HERE = Path(__file__).parent


@pytest.fixture
def export(model_of, recipe_of, run_chain):
    """Return a function that exports a factory to one format and returns the artifacts."""

    def run(factory: str, form: str, options: dict | None = None, **changes):
        stages = {"export": {"formats": [form], **(options or {})}}
        return run_chain(recipe_of(model_of(factory, **changes), stages=stages), Samples, Eager, Export)

    return run


NESTED = {
    "inputs": {
        name: {"dtype": "float32", "shape": ["batch", 4]} for name in ("x", "state.h", "state.c", "past.0", "past.1")
    },
    "outputs": ["y", "h", "c"],
    "shapes": {"batch": {"min": 1, "opt": 2, "max": 4}},
}
IDS = {
    "inputs": {"ids": {"dtype": "int64", "shape": ["batch", "seq"], "values": {"low": 0, "high": 10}}},
    "outputs": ["embedding", "again", "same"],
}


BUILD = """
import importlib.util, json, sys
from pathlib import Path
from vbpipe.core import Artifact, Site
from vbpipe.recipe.model import Recipe
from vbpipe_stages.eager import Eager
from vbpipe_stages.export import Export
from vbpipe_stages.samples import Samples

spec = importlib.util.spec_from_file_location("conftest", sys.argv[1])
conftest = importlib.util.module_from_spec(spec)
spec.loader.exec_module(conftest)
recipe = Recipe.model_validate_json(Path(sys.argv[2]).read_bytes())
made = {}
for cls in (Samples, Eager, Export):
    for stage in cls.configure(recipe, recipe.targets["cpu"]):
        out = Path(sys.argv[3]) / stage.label()
        out.mkdir(parents=True)
        meta = stage.run({kind: made[kind] for kind in stage.consumes()}, out, Site(Path(sys.argv[1]).parent))
        made[stage.produces()] = Artifact(stage.produces(), conftest.digest_of(out), out, meta)
print(json.dumps({kind: artifact.digest for kind, artifact in made.items()}))
"""


def dims(value: onnx.ValueInfoProto) -> list[str | int]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def test_one_step_per_format_and_options_of_the_other_format_are_not_in_its_key(model_of, recipe_of) -> None:
    low, high = (
        Export.configure(recipe_of(model_of("plain"), stages={"export": {"opset": opset}}), None) for opset in (18, 20)
    )
    assert [step.label() for step in low] == ["export.torchscript", "export.onnx"]
    assert low[0] == high[0]
    assert low[1] != high[1]


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_an_onnx_graph_has_the_recipes_names_and_symbols(export, exporter) -> None:
    made = export("plain", "onnx", {"exporter": exporter})["onnx"]
    graph = onnx.load(made.path / "model.onnx").graph
    assert [(value.name, dims(value)) for value in graph.input] == [("x", ["batch", "seq", 4])]
    assert [(value.name, dims(value)) for value in graph.output] == [("y", ["batch", "seq", 8])]
    assert made.meta["exporter"] == {"dynamo": "dynamo", "torchscript": "trace"}[exporter]
    assert made.meta["fallback_reason"] is None


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_provenance_names_modules_and_parameters_as_the_recipes_model_does(export, exporter) -> None:
    made = export("plain", "onnx", {"exporter": exporter})["onnx"]
    provenance = Provenance.read(made.path)
    graph = onnx.load(made.path / "model.onnx").graph
    weights = {
        name: provenance.parameters[name] for node in graph.node for name in node.input if name in provenance.parameters
    }
    products = [node for node in graph.node if node.op_type in ("MatMul", "Gemm")]
    assert [provenance.nodes[node.output[0]] for node in products] == ["first", "layers.0", "layers.1"]
    assert {provenance.class_of(node.output[0]) for node in products} == {"Linear"}
    assert [weights[node.input[1]] for node in products] == ["first.weight", "layers.0.weight", "layers.1.weight"]
    assert (
        provenance.class_of(next(n for n in graph.node if n.op_type == "LayerNormalization").output[0]) == "LayerNorm"
    )


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_module_called_twice_keeps_its_path(export, exporter) -> None:
    made = export("calls_twice", "onnx", {"exporter": exporter})["onnx"]
    graph = onnx.load(made.path / "model.onnx").graph
    products = [node for node in graph.node if node.op_type in ("MatMul", "Gemm")]
    assert [Provenance.read(made.path).nodes[node.output[0]] for node in products] == ["shared", "shared"]


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_nothing_of_this_machine_is_in_the_graph(export, exporter) -> None:
    made = export("plain", "onnx", {"exporter": exporter})["onnx"]
    text = (made.path / "model.onnx").read_bytes()
    assert b"little_models" not in text
    assert b"stack_trace" not in text
    assert str(Path.home()).encode() not in text


@pytest.mark.parametrize("form", ["torchscript", "onnx"])
def test_nested_inputs_and_outputs_are_flat_in_the_program(export, form) -> None:
    made = export("nested", form, {}, **NESTED)
    artifact = made[form]
    assert list(Interface.read(artifact.path).inputs) == ["x", "state.h", "state.c", "past.0", "past.1"]
    row = {name: np.full((3, 4), index, np.float32) for index, name in enumerate(NESTED["inputs"])}
    backend = {"torchscript": "torchscript", "onnx": "onnxruntime"}[form]
    with open_runner(Runner(backend=backend), form, artifact.path) as run:
        found = run(row)
    assert list(found) == ["y", "h", "c"]
    assert np.allclose(found["h"], found["y"] + 1)
    assert np.allclose(found["c"], 4)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_outputs_may_be_called_like_operators_and_may_be_one_value_or_an_input(export, exporter) -> None:
    made = export("collides", "onnx", {"exporter": exporter}, **IDS)["onnx"]
    with open_runner(Runner(backend="onnxruntime"), "onnx", made.path) as run:
        ids = np.array([[1, 2, 3]])
        found = run({"ids": ids})
    assert np.array_equal(found["embedding"], found["again"])
    assert np.array_equal(found["same"], ids)


def test_a_branch_that_a_trace_bakes_is_caught_and_the_source_is_compiled_instead(export) -> None:
    made = export("branch", "torchscript")["torchscript"]
    assert made.meta["exporter"] == "script"
    assert "batch=1,seq=1" in made.meta["fallback_reason"]


def test_a_branch_that_a_trace_bakes_is_refused_when_only_tracing_is_allowed(export) -> None:
    with pytest.raises(VbpipeError) as caught:
        export("branch", "torchscript", {"script": "trace"})
    assert "trace: at batch=1,seq=1 output 'y' differs from eager's" in str(caught.value)
    assert "Branches on tensor values" in str(caught.value)


def test_a_length_that_every_exporter_bakes_is_refused_with_all_reasons(export) -> None:
    with pytest.raises(VbpipeError) as caught:
        export("baked_length", "onnx")
    assert "dynamo" in str(caught.value)
    assert "trace: " in str(caught.value)
    assert "script" in str(caught.value)


def test_what_torch_export_refuses_falls_back_to_tracing_with_the_reason(export) -> None:
    made = export("checks_its_input", "onnx")["onnx"]
    assert made.meta["exporter"] == "trace"
    assert made.meta["fallback_reason"].startswith("dynamo")
    assert len(made.meta["fallback_reason"]) < 600
    operators = {node.op_type for node in onnx.load(made.path / "model.onnx").graph.node}
    assert operators == {"Abs", "Constant", "Add"}


@pytest.mark.parametrize("form", ["torchscript", "onnx"])
def test_a_model_that_changes_its_input_leaves_the_callers_array_alone(export, form) -> None:
    made = export("in_place", form, {"exporter": "torchscript"})[form]
    given = np.ones((1, 2, 4), np.float32)
    with open_runner(Runner(backend={"onnx": "onnxruntime"}.get(form, form)), form, made.path) as run:
        first, second = run({"x": given}), run({"x": given})
    assert np.array_equal(given, np.ones((1, 2, 4)))
    assert np.array_equal(first["y"], second["y"])


def test_weights_that_differ_at_every_load_are_refused(export) -> None:
    with pytest.raises(VbpipeError, match="other weights each time"):
        export("unseeded", "torchscript")


def test_a_model_that_is_not_deterministic_is_refused_with_that_reason(export) -> None:
    with pytest.raises(VbpipeError, match="make it deterministic"):
        export("random", "torchscript", {"script": "trace"})


def test_a_symbol_of_one_size_is_a_constant_in_the_graph(export) -> None:
    shapes = {"batch": {"min": 1, "opt": 1, "max": 1}, "seq": {"min": 2, "opt": 6, "max": 16}}
    made = export("plain", "onnx", {}, shapes=shapes)["onnx"]
    graph = onnx.load(made.path / "model.onnx").graph
    assert dims(graph.input[0]) == [1, "seq", 4]


def test_equal_models_give_equal_bytes_in_another_process(export, tmp_path) -> None:
    """A new process: within one, torch numbers the classes that it compiles."""
    inputs = {"x": {"dtype": "float32", "shape": ["batch", "seq", 4]}}
    shapes = {"batch": {"min": 1, "opt": 2, "max": 8}, "seq": {"min": 1, "opt": 6, "max": 16}}
    model = {"factory": "little_models.py:plain", "inputs": inputs, "outputs": ["y"], "shapes": shapes}
    recipe = {"recipe": 1, "name": "little", "model": model, "targets": {"cpu": {"backend": "onnxruntime"}}}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    answers = [
        subprocess.run(
            [
                sys.executable,
                "-c",
                BUILD,
                str(HERE / "conftest.py"),
                str(tmp_path / "recipe.json"),
                str(tmp_path / name),
            ],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.splitlines()[-1]
        for name in ("here", "and-there")
    ]
    assert answers[0] == answers[1]
    assert set(json.loads(answers[0])) == {"samples", "reference", "torchscript", "onnx"}


def test_the_check_samples_agree_with_eager_through_the_exported_program(export) -> None:
    made = export("plain", "torchscript")
    rows = samples.load(made["samples"].path / "check.safetensors")
    expected = samples.load(made["reference"].path / "reference.safetensors")
    with open_runner(Runner(backend="torchscript"), "torchscript", made["torchscript"].path) as run:
        for row, wanted in zip(rows, expected, strict=True):
            assert np.allclose(run(row)["y"], wanted["y"], atol=1e-6)


def test_large_weights_go_to_a_file_beside_the_graph(export, monkeypatch) -> None:
    monkeypatch.setattr(_to_onnx, "_EXTERNAL_BYTES", 100)
    made = export("wide", "onnx", {"exporter": "torchscript"})["onnx"]
    assert (made.path / "model.onnx.data").stat().st_size >= 4 * 256 * 4
    assert (made.path / "model.onnx").stat().st_size < 4 * 256 * 4
    with open_runner(Runner(backend="onnxruntime"), "onnx", made.path) as run:
        assert run({"x": np.ones((1, 2, 4), np.float32)})["y"].shape == (1, 2, 256)


@pytest.mark.parametrize("opset", [13, 17])
def test_an_opset_below_what_torch_export_gives_is_honoured_by_tracing(export, opset) -> None:
    made = export("plain", "onnx", {"opset": opset})["onnx"]
    graph = onnx.load(made.path / "model.onnx")
    assert [item.version for item in graph.opset_import if not item.domain] == [opset]
    assert "opset 18 or higher" in made.meta["fallback_reason"]


@pytest.mark.parametrize("factory", ["recurrent", "encoder", "tied"])
@pytest.mark.parametrize("form", ["torchscript", "onnx"])
def test_common_architectures_export_at_every_size(export, factory, form) -> None:
    changes = {"inputs": IDS["inputs"], "outputs": ["logits"]} if factory == "tied" else {}
    made = export(factory, form, **changes)[form]
    assert made.meta["exporter"] in ("trace", "dynamo")
