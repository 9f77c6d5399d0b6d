"""Provenance goes through a rewrite: a fused node stands for all nodes that it replaced, and nothing else."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from vbpipe_stages._provenance import Provenance
from vbpipe_stages._trace import carried, common


def graph(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("x", "y")]
    weights = [numpy_helper.from_array(np.ones((4, 4), np.float32), f"w{index}") for index in range(3)]
    return helper.make_model(helper.make_graph(list(nodes), "g", values[:1], values[1:], weights))


def node(op: str, inputs: str, output: str) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), [output])


BEFORE = graph(
    node("MatMul", "x w0", "a"),
    node("MatMul", "x w1", "b"),
    node("Add", "a b", "c"),
    node("Relu", "c", "d"),
    node("MatMul", "d w2", "e"),
    node("Relu", "e", "y"),
)
PROVENANCE = Provenance(
    nodes={"a": "net.left", "b": "net.right", "c": "net", "d": "net.act", "e": "net.out", "y": "net.act2"},
    parameters={"w0": "net.left.weight", "w2": "net.out.weight"},
)


def test_a_rewrite_that_changes_nothing_changes_no_provenance() -> None:
    found = carried(PROVENANCE, BEFORE, BEFORE)
    assert found.nodes == PROVENANCE.nodes
    assert found.parts == {}


def test_a_fused_node_stands_for_all_that_lies_between_its_inputs_and_its_output() -> None:
    after = graph(node("Fused", "x w0 w1", "d"), node("MatMul", "d w2", "e"), node("Relu", "e", "y"))
    found = carried(PROVENANCE, BEFORE, after)
    assert found.modules_of("d") == ("net.left", "net.right", "net", "net.act")
    assert found.nodes["d"] == "net.act"
    assert found.modules_of("e") == ("net.out",)
    assert found.parts.keys() == {"d"}


def test_what_another_new_node_still_makes_is_not_counted_twice() -> None:
    after = graph(
        node("MatMul", "x w0", "a"),
        node("FusedAdd", "a x w1", "d"),
        node("MatMul", "d w2", "e"),
        node("Relu", "e", "y"),
    )
    found = carried(PROVENANCE, BEFORE, after)
    assert found.modules_of("a") == ("net.left",)
    assert found.modules_of("d") == ("net.right", "net", "net.act")


def test_a_node_with_a_new_output_gets_what_its_neighbours_share_or_what_it_stands_for() -> None:
    after = graph(
        node("MatMul", "x w0", "a"),
        node("MatMul", "x w1", "b"),
        node("Concat", "a b", "new"),
        node("Sum", "new", "d"),
        node("Round", "d", "rounded"),
        node("MatMul", "rounded w2", "e"),
        node("Relu", "e", "y"),
    )
    found = carried(PROVENANCE, BEFORE, after, {"rounded": "d"})
    assert found.nodes["new"] == "net"
    assert found.nodes["rounded"] == "net.act"
    assert found.modules_of("d") == ("net", "net.act")


def test_parts_of_parts_are_kept_through_a_second_rewrite() -> None:
    after = graph(node("Fused", "x w0 w1", "d"), node("MatMul", "d w2", "e"), node("Relu", "e", "y"))
    once = carried(PROVENANCE, BEFORE, after)
    final = graph(node("All", "x w0 w1 w2", "y"))
    twice = carried(once, after, final)
    assert twice.modules_of("y") == ("net.left", "net.right", "net", "net.act", "net.out", "net.act2")
    assert twice.parameters == PROVENANCE.parameters


def test_the_module_around_several_is_what_their_paths_begin_with() -> None:
    assert common(["a.b.c", "a.b.d"]) == "a.b"
    assert common(["a", "b"]) == ""
    assert common([]) == ""
