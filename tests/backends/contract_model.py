"""A small model with two inputs of different types and two outputs, for the backends' contract."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.mix = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens, weights):
        hidden = torch.relu(self.mix(self.table(tokens) * weights.unsqueeze(-1)))
        return self.head(hidden), hidden.mean(dim=1)


def build():
    torch.manual_seed(0)
    return Two().eval()


def calibration():
    generator = np.random.default_rng(0)
    for batch, seq in ((1, 5), (2, 3), (3, 8)):
        yield {
            "tokens": generator.integers(0, 10, (batch, seq)),
            "weights": generator.random((batch, seq), dtype=np.float32),
        }
