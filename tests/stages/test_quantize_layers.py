"""Which rule decides for a module is told from the model alone, and agrees with what the graph then gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vbpipe.core import LayerChoice
from vbpipe.errors import VbpipeError
from vbpipe.recipe.model import Model
from vbpipe_stages.quantize import Quantize

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 32)
        self.block = torch.nn.ModuleDict({"up": torch.nn.Linear(32, 48), "down": torch.nn.Linear(48, 32)})
        self.norm = torch.nn.LayerNorm(32)
        self.conv = torch.nn.Conv1d(32, 32, 1)
        self.head = torch.nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.norm(self.block["down"](torch.relu(self.block["up"](self.embed(ids)))))
        return self.head(self.conv(x.transpose(1, 2)).transpose(1, 2))

def build():
    torch.manual_seed(0)
    return Net().eval()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def choices(root: Path, *rules: dict[str, Any], default: Any = None) -> dict[str, LayerChoice]:
    model = Model.model_validate(
        {
            "factory": "net.py:build",
            "inputs": {"ids": {"dtype": "int64", "shape": ["batch", 5]}},
            "outputs": ["y"],
            "shapes": {"batch": {"min": 1, "opt": 2, "max": 4}},
        }
    )
    options = {"rules": list(rules), "dialect": "onnxruntime"} | ({} if default is None else {"default": default})
    return {one.module: one for one in Quantize.model_validate(options).layers(model, root)}


def test_every_module_with_a_weight_is_told_with_the_rule_that_decides(root: Path) -> None:
    found = choices(
        root,
        {"match": "block.up", "keep": True},
        {"match": "block", "weight": "int4", "group_size": 16},
        {"regex": "head|conv", "weight": "int8"},
    )
    assert list(found) == ["embed", "block.up", "block.down", "conv", "head"]
    assert [one.gets for one in found.values()] == ["float", "float", "weight_only int4", "static int8", "dynamic int8"]
    assert [one.rule for one in found.values()] == [
        "default",
        "rules[0] match=block.up",
        "rules[1] match=block",
        "rules[2] regex=head|conv",
        "rules[2] regex=head|conv",
    ]


def test_tied_weights_and_tables_are_said(root: Path) -> None:
    found = choices(root)
    assert "only where a rule names" in found["embed"].note
    assert found["head"].note == "shares its weight with embed"
    assert choices(root, {"type": "Embedding", "weight": "int8"})["embed"].gets == "table int8"


def test_groups_that_do_not_divide_are_said_before_anything_runs(root: Path) -> None:
    found = choices(root, default={"weight": "int4", "group_size": 32})
    assert found["block.down"].note == "refused: group_size 32 does not divide its 48 inputs"
    assert found["block.up"].note == ""
    assert found["conv"].gets == "float"
    assert "no form with only its weights" in found["conv"].note
    asked = choices(root, {"type": "Conv1d", "weight": "int4"})
    assert asked["conv"].note.startswith("refused: a Conv has no form")


def test_a_rule_that_meets_no_module_names_near_ones(root: Path) -> None:
    with pytest.raises(VbpipeError, match=r"block\.upp.*block\.up"):
        choices(root, {"match": "block.upp", "keep": True})


def test_a_rule_on_an_operator_decides_for_the_classes_that_become_it(root: Path) -> None:
    found = choices(root, {"op": "Gemm", "keep": True})
    assert found["block.up"].gets == "float"
    assert found["conv"].gets == "static int8"
