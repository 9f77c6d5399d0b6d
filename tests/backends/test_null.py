"""The interpreter is right where onnx's own operators are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from vbpipe_stages._interface import Interface
from vbpipe_stages.backends.null import Null


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gathering_elements_works_for_more_than_64_indices(axis: int, tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("GatherElements", ["data", "places"], ["y"], axis=axis)],
        "g",
        [
            helper.make_tensor_value_info("data", TensorProto.FLOAT, [100, 100]),
            helper.make_tensor_value_info("places", TensorProto.INT64, [70, 70]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [70, 70])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    Interface.model_validate(
        {
            "inputs": {
                "data": {"dtype": "float32", "shape": [100, 100]},
                "places": {"dtype": "int64", "shape": [70, 70]},
            },
            "outputs": ["y"],
        }
    ).write(tmp_path)
    rng = np.random.default_rng(0)
    data, places = rng.random((100, 100), dtype=np.float32), rng.integers(-100, 100, (70, 70))
    with Null().open("engine", tmp_path, 1) as run:
        got = run({"data": data, "places": places})["y"]
    for row, column in ((0, 0), (3, 69), (69, 5)):
        place = places[row, column]
        assert got[row, column] == (data[place, column] if axis == 0 else data[row, place])
