"""Patterns are counted where they are, fused or apart, and nowhere else."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vbpipe_stages._patterns import Fusion, compare_patterns, count_patterns
from vbpipe_stages.fuse import Fuse, Report


def graph(*nodes: str, opset: int = 20) -> onnx.ModelProto:
    """Return a graph of "Op inputs -> outputs" lines over x; names that begin with w are weights."""
    made = []
    for line in nodes:
        op, rest = line.split(" ", 1)
        inputs, outputs = (part.split() for part in rest.split("->"))
        domain, _, name = op.rpartition(":")
        made.append(helper.make_node(name, inputs, outputs, domain=domain))
    names = {name for node in made for name in node.input if name.startswith("w")}
    weights = [numpy_helper.from_array(np.ones((4, 4), np.float32), name) for name in sorted(names)]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("x", "y")]
    body = helper.make_graph(made, "g", values[:1], values[1:], weights)
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", opset)])


def counts(*nodes: str) -> dict[str, tuple[int, int]]:
    return {one.name: (one.fused, one.apart) for one in count_patterns(graph(*nodes))}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (
            ["MatMul x k -> s", "Mul s w -> t", "Add t m -> u", "Softmax u -> p", "MatMul p v -> y"],
            {"attention": (0, 1)},
        ),
        (
            ["MatMul x k -> s", "Softmax s -> p", "IsNaN p -> n", "Where n w p -> q", "MatMul q v -> y"],
            {"attention": (0, 1)},
        ),
        (["MatMul x w -> s", "Softmax s -> y"], {}),  # a classifier's
        (["com.microsoft:MultiHeadAttention x x x -> y"], {"attention": (1, 0)}),
        (
            ["ReduceMean x -> m", "Sub x m -> d", "Pow d w -> q", "ReduceMean q -> v", "Sqrt v -> s", "Div d s -> y"],
            {"layer_norm": (0, 1)},
        ),
        (["Mul x x -> q", "ReduceMean q -> v", "Sqrt v -> s", "Div x s -> y"], {"rms_norm": (0, 1)}),
        (["ReduceMean x -> y"], {}),
        (
            ["Relu x -> a", "Add x a -> s", "LayerNormalization s w w2 -> y"],
            {"layer_norm": (1, 0), "skip_norm": (0, 1)},
        ),
        (["Add x w -> s", "LayerNormalization s w w2 -> y"], {"layer_norm": (1, 0)}),  # a bias, not a residual
        (
            ["Gather w x -> a", "Gather w2 x -> b", "Add a b -> s", "LayerNormalization s w3 w4 -> y"],
            {"layer_norm": (1, 0), "embedding_norm": (0, 1)},
        ),
        (["com.microsoft:SkipLayerNormalization x x w w2 -> y"], {"layer_norm": (1, 0), "skip_norm": (1, 0)}),
        (["MatMul x w -> a", "Add a w2 -> b", "Gelu b -> y"], {"gelu": (1, 0), "bias_gelu": (0, 1)}),
        (["com.microsoft:BiasGelu x w -> y"], {"gelu": (1, 0), "bias_gelu": (1, 0)}),
        (["Erf x -> y"], {"gelu": (0, 1)}),
        (
            ["Conv x w -> a", "BatchNormalization a w1 w2 w3 w4 -> b", "Relu b -> y"],
            {"conv_norm": (0, 1)},
        ),
        (["Conv x w -> a", "Clip a w1 w2 -> y"], {"conv_activation": (0, 1)}),
        (["Neg x -> n", "Concat n x -> y"], {"rotary": (0, 1)}),
    ],
)
def test_a_pattern_is_found_in_its_forms(nodes: list[str], expected: dict[str, tuple[int, int]]) -> None:
    assert counts(*nodes) == expected


def test_what_is_left_apart_has_a_reason_and_what_is_fused_has_none() -> None:
    before = graph("MatMul x w -> a", "Add a w2 -> b", "Gelu b -> c", "Erf c -> y")
    after = graph("MatMul x w -> a", "com.microsoft:BiasGelu a w2 -> c", "Erf c -> y")
    found = compare_patterns(before, after, lambda name: f"about {name}")
    assert found == (Fusion("gelu", 2, 1, "about gelu"), Fusion("bias_gelu", 1, 1, ""))


MISSED = (Fusion("attention", 6, 0, "no pass knows this form of it"),)


def test_a_fusion_that_was_asked_for_and_never_fired_is_said_aloud() -> None:
    assert Fuse(contrib=True)._silent(MISSED) == "none of 6 attention was fused: no pass knows this form of it"
    assert Fuse(contrib=True)._silent((Fusion("attention", 6, 1, "x"),)) is None
    assert Fuse(contrib=True, level="basic")._silent(MISSED) is None
    assert Fuse(contrib=False)._silent(MISSED) is None


@pytest.mark.parametrize(
    ("stage", "pattern", "said"),
    [
        (Fuse(contrib=False), "attention", "ONNX's own operators only"),
        (Fuse(contrib=True, level="basic"), "skip_norm", "level basic does not look for it"),
        (Fuse(contrib=True), "conv_activation", "left to build"),
        (Fuse(contrib=True, passes=("fold",)), "gelu", "none of the passes asked for (fold)"),
        (Fuse(contrib=True), "attention", "no pass knows this form"),
    ],
)
def test_the_reason_is_the_one_that_applies(stage: Fuse, pattern: str, said: str) -> None:
    assert said in stage._why_apart(pattern, [])


def test_a_pass_that_was_left_out_is_the_reason() -> None:
    report = Report("transformer", 9, 9, {}, changed=False, reason="left out: it failed: KeyError: 'x'")
    assert "pass transformer was left out: it failed" in Fuse(contrib=True)._why_apart("attention", [report])
