"""A quantized graph is compared with its float graph module by module, and the culprit is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vbpipe.fidelity import EXACT_DB
from vbpipe_stages._damage import (
    ModuleDamage,
    describe_damage,
    find_damage,
    first_below,
    read_damage,
    tolerance_db,
    worst_first,
    write_damage,
)
from vbpipe_stages._provenance import Provenance

LAYERS = 5
WIDTH = 32
PROVENANCE = Provenance(
    nodes={f"{kind}{index}": f"net.{index}" for index in range(LAYERS) for kind in ("product", "sum", "relu")}
)


def chain(scales: dict[int, float] | None = None, noise: dict[int, float] | None = None) -> onnx.ModelProto:
    """Return x -> (MatMul, Add, Relu) five times; a layer's weights may be scaled, or have noise of a relative size."""
    rng = np.random.default_rng(0)
    nodes, weights, name = [], [], "x"
    for index in range(LAYERS):
        weight = (rng.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH / 2)).astype(np.float32)
        errors = np.random.default_rng(index).standard_normal(weight.shape).astype(np.float32) * weight.std()
        weight = weight * (scales or {}).get(index, 1.0) + errors * (noise or {}).get(index, 0.0)
        weights.append(numpy_helper.from_array(weight.astype(np.float32), f"w{index}"))
        weights.append(numpy_helper.from_array(np.full(WIDTH, 0.1, np.float32), f"b{index}"))
        nodes += [
            helper.make_node("MatMul", [name, f"w{index}"], [f"product{index}"]),
            helper.make_node("Add", [f"product{index}", f"b{index}"], [f"sum{index}"]),
            helper.make_node("Relu", [f"sum{index}"], [f"relu{index}"]),
        ]
        name = f"relu{index}"
    shape = ["batch", WIDTH]
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def rows() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(7)
    return [{"x": rng.standard_normal((size, WIDTH)).astype(np.float32)} for size in (1, 3)]


@pytest.mark.parametrize("index", range(LAYERS))
def test_the_one_module_whose_weights_are_wrong_is_the_first_below_any_tolerance(index: int) -> None:
    found = find_damage(chain(), chain(scales={index: 1e4}), PROVENANCE, PROVENANCE.nodes, rows())
    assert [one.module for one in found] == [f"net.{layer}" for layer in range(LAYERS)]
    first = first_below(found, 20.0)
    assert first is not None
    assert first.module == f"net.{index}"
    assert all(one.sqnr_db == EXACT_DB and one.own == 0 for one in found[:index])
    assert [one.module for one in worst_first(found)] == [f"net.{index}"]


def test_error_that_a_module_was_given_is_not_counted_as_its_own() -> None:
    found = find_damage(chain(), chain(noise={1: 0.05, 3: 0.2}), PROVENANCE, PROVENANCE.nodes, rows())
    assert [one.module for one in worst_first(found)] == ["net.3", "net.1"]
    by_name = {one.module: one for one in found}
    assert by_name["net.2"].own == by_name["net.4"].own == 0
    assert by_name["net.4"].sqnr_db < 40
    assert by_name["net.3"].own == pytest.approx(16 * (by_name["net.1"].own or 0), rel=0.8)


def test_equal_graphs_have_no_damage() -> None:
    found = find_damage(chain(), chain(), PROVENANCE, PROVENANCE.nodes, rows())
    assert [one.sqnr_db for one in found] == [EXACT_DB] * LAYERS
    assert worst_first(found) == []
    assert describe_damage(found, 20.0) == ""


def test_outputs_that_are_no_numbers_are_the_worst_there_is() -> None:
    found = find_damage(chain(), chain(scales={2: float("nan")}), PROVENANCE, PROVENANCE.nodes, rows())
    first = first_below(found, -100.0)
    assert first is not None
    assert (first.module, first.sqnr_db) == ("net.2", -EXACT_DB)


def test_a_tensor_that_only_one_graph_has_is_passed_over() -> None:
    other = chain(scales={1: 1.5})
    for node in other.graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if name == "relu0":
                    names[place] = "renamed"
    found = find_damage(chain(), other, PROVENANCE, PROVENANCE.nodes, rows())
    assert [one.module for one in found] == [f"net.{index}" for index in range(LAYERS)]
    assert found[0].sqnr_db == EXACT_DB


def test_the_sentence_names_the_first_and_the_worst_and_the_rules_that_keep_them() -> None:
    found = (
        ModuleDamage("a", 30.0, 0.001),
        ModuleDamage("b", 12.0, 0.06),
        ModuleDamage("c", 11.0, 0.02),
        ModuleDamage("d", 11.0, None),
    )
    text = describe_damage(found, 16.9)
    assert text.startswith("the first module below 16.9 dB is b (12.0 dB).")
    assert "b (6.00% of its output's power), c (2.00%" in text
    assert text.endswith("[{match: 'b', keep: true}, {match: 'c', keep: true}, {match: 'a', keep: true}]")
    assert "below" not in describe_damage(found, 5.0)


@pytest.mark.parametrize(("cosine", "decibel"), [(0.5**0.5, 0.0), (0.99, 16.92), (0.9, 6.30)])
def test_a_cosine_is_the_sqnr_of_an_independent_error(cosine: float, decibel: float) -> None:
    assert tolerance_db(cosine) == pytest.approx(decibel, abs=0.01)
    rng = np.random.default_rng(0)
    signal, error = rng.standard_normal((2, 400_000))
    off = signal + error * 10 ** (-decibel / 20)
    measured = float(signal @ off / np.linalg.norm(signal) / np.linalg.norm(off))
    assert measured == pytest.approx(cosine, abs=0.003)


def test_damage_survives_its_file(tmp_path: Path) -> None:
    assert read_damage(tmp_path) == ()
    write_damage([ModuleDamage("a.b", 12.345678, 0.0123456789), ModuleDamage("c", 1.0, None)], tmp_path)
    assert read_damage(tmp_path) == (ModuleDamage("a.b", 12.35, 0.012346), ModuleDamage("c", 1.0, None))
