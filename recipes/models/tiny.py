"""A one-layer attention classifier of made-up sequences, small enough for every test of the pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import nn

FEATURES, HIDDEN, CLASSES = 16, 32, 5
NOISE = 2.5
"""Standard deviation of a step around its class's prototype: enough that some sequences are classified wrongly."""

Array = np.ndarray
Run = Callable[[Mapping[str, Array]], dict[str, Array]]


class Attention(nn.Module):
    """Scaled dot-product self-attention with `heads` heads."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, seq, self.heads, hidden // self.heads).transpose(1, 2)

        attended = nn.functional.scaled_dot_product_attention(
            split(self.query(x)), split(self.key(x)), split(self.value(x))
        )
        return self.output(attended.transpose(1, 2).reshape(batch, seq, hidden))


class Classifier(nn.Module):
    """Embed each step, mix steps by attention, and score the mean against one direction per class."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, hidden)
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.ffn_norm = nn.LayerNorm(hidden)
        self.ffn = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, CLASSES] of x [batch, seq, FEATURES]."""
        h = self.embed(x)
        h = h + self.attention(self.attention_norm(h))
        h = h + self.ffn(self.ffn_norm(h))
        return self.head(h.mean(dim=1))


def build(hidden: int = HIDDEN, heads: int = 4, seed: int = 0) -> nn.Module:
    """Return the classifier with weights drawn from `seed`; its head knows the prototypes, so it needs no training."""
    generator = torch.Generator().manual_seed(seed)
    model = Classifier(hidden, heads)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.5 / math.sqrt(parameter.shape[1]), generator=generator)
        model.embed.weight.mul_(2)
        model.head.weight.copy_(nn.functional.normalize(_prototypes() @ model.embed.weight.T, dim=1) * 4)
        model.head.bias.zero_()
    return model.eval()


def calibration() -> Iterator[dict[str, Array]]:
    """Yield 16 batches of different sizes."""
    generator = np.random.default_rng(11)
    for index in range(16):
        x, _ = _sequences(generator, batch=1 + index % 4, seq=8 + index)
        yield {"x": x}


def evaluate(run: Run) -> dict[str, dict[str, float]]:
    """Return the accuracy on 256 sequences, with its 95 % interval (Wilson)."""
    generator = np.random.default_rng(12)
    right = total = 0
    for index in range(32):
        x, labels = _sequences(generator, batch=8, seq=8 + index % 9)
        right += int((run({"x": x})["logits"].argmax(axis=1) == labels).sum())
        total += len(labels)
    low, high = _wilson(right, total)
    return {"accuracy": {"value": right / total, "low": low, "high": high, "n": total}}


def _prototypes() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(10).standard_normal((CLASSES, FEATURES)).astype(np.float32))


def _sequences(generator: np.random.Generator, batch: int, seq: int) -> tuple[Array, Array]:
    """Return x float32 [batch, seq, FEATURES] and labels int64 [batch]."""
    labels = generator.integers(0, CLASSES, batch)
    noise = generator.standard_normal((batch, seq, FEATURES)) * NOISE
    return (_prototypes().numpy()[labels][:, None, :] + noise).astype(np.float32), labels


def _wilson(right: int, total: int) -> tuple[float, float]:
    z, share = 1.96, right / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return max(0.0, middle - half), min(1.0, middle + half)
