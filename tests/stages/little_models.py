"""Little modules that a recipe may bring, each with one thing that exporters trip over."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn


class Plain(nn.Module):
    def __init__(self, features: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(features, 8)
        self.norm = nn.LayerNorm(8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x):
        x = self.norm(self.first(x))
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def plain():
    return Plain().eval()


def wide():
    return nn.Linear(4, 256).eval()


def train_mode():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))


def nan_weight():
    model = Plain()
    with torch.no_grad():
        model.layers[1].weight[0, 0] = float("nan")
    return model


def the_class():
    return Plain


def state_dict():
    return Plain().state_dict()


def raises():
    raise KeyError("no checkpoint")


def on_meta():
    return nn.Linear(4, 4, device="meta")


class Nested(nn.Module):
    """Arguments by keyword, in a dict and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x, *, state, past, scale=1.0):
        h = torch.tanh(self.mix(x) + state["h"] + past[0] * past[1]) * scale
        return {"y": h, "state": {"h": h + 1, "c": state["c"] * 2}}


def nested():
    return Nested().eval()


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor
    cache: None = None


class ByKey(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x):
        return Output(logits=self.mix(x), hidden=x * 2)


def by_key():
    return ByKey().eval()


class NotOnlyTensors(nn.Module):
    def forward(self, x):
        return x * 2, "label"


def not_only_tensors():
    return NotOnlyTensors().eval()


class Branch(nn.Module):
    """A trace keeps one side; the source can be compiled."""

    def forward(self, x):
        if x.shape[0] > 1:
            return x * 2
        return x + 10


def branch():
    return Branch().eval()


class BakedLength(nn.Module):
    """A tracer writes the length that it saw into Reshape; so does every exporter."""

    def forward(self, x):
        length = int(np.prod([int(size) for size in x.shape[:2]]))
        return x.reshape(length, 4).reshape(x.shape)


def baked_length():
    return BakedLength().eval()


class Window(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, kernel_size=5)

    def forward(self, x):
        return self.conv(x.transpose(1, 2))


def window():
    return Window().eval()


class ChecksItsInput(nn.Module):
    """torch.export refuses a branch on values; a trace leaves the check out, which is right for sound inputs."""

    def forward(self, x):
        if torch.isnan(x).any():
            raise ValueError("NaN")
        return x.abs() + 1


def checks_its_input():
    return ChecksItsInput().eval()


class Random(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


def random():
    return Random().eval()


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(2) + 1


def in_place():
    return InPlace().eval()


class Halves(nn.Module):
    def forward(self, x):
        return x.to(torch.bfloat16)


def bfloat16():
    return Halves().eval()


class GivesNan(nn.Module):
    def forward(self, x):
        return torch.log(-x.abs())


def gives_nan():
    return GivesNan().eval()


class Collides(nn.Module):
    """An output called like an operator inside, one that is an input, and one value twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, ids):
        found = self.table(ids).sum(1)
        return found, found, ids


def collides():
    return Collides().eval()


class CallsTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)

    def forward(self, x):
        return self.shared(torch.relu(self.shared(x)))


def calls_twice():
    return CallsTwice().eval()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.lstm(x)[0]


def recurrent():
    return Recurrent().eval()


def encoder():
    """With the fused path that PyTorch takes in eval mode."""
    layer = nn.TransformerEncoderLayer(4, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.table(ids))


def tied():
    return Tied().eval()


def unseeded():
    """Draws its weights anew at every call, from a generator that nobody seeds."""
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(np.random.default_rng().standard_normal((4, 4))))
    return model.eval()


def ragged():
    for index in range(6):
        yield {"x": np.full((1 + index % 2, 2 + index, 4), index, np.float32)}


def torch_samples():
    return [{"x": torch.ones(2, 3, 4)}]


def endless():
    while True:
        yield {"x": np.ones((1, 3, 4), np.float32)}


def one_buffer():
    buffer = np.zeros((1, 3, 4), np.float32)
    for index in range(3):
        buffer[:] = index
        yield {"x": buffer}


def fails_late():
    yield {"x": np.ones((1, 3, 4), np.float32)}
    raise RuntimeError("disk is gone")


def nothing():
    return iter(())


def forgot_to_yield():
    pass


def tuples():
    yield (np.ones((1, 3, 4), np.float32),)


def wrong_dtype():
    yield {"x": np.ones((1, 3, 4))}


def wrong_shape():
    yield {"x": np.ones((1, 3, 5), np.float32)}


def holds_nan():
    yield {"x": np.full((1, 3, 4), np.nan, np.float32)}


def score(run):
    outputs = [run({"x": np.full((1, 3, 4), index, np.float32)})["y"] for index in range(5)]
    return {"mean": float(np.mean(outputs)), "interval": {"value": 1.0, "low": 0.5, "high": 2.0, "n": 5}}


def score_nan(run):
    run({"x": np.ones((1, 3, 4), np.float32)})
    return {"accuracy": float("nan")}


def score_text(run):
    run({"x": np.ones((1, 3, 4), np.float32)})
    return {"accuracy": "good"}


def score_nothing(run):
    run({"x": np.ones((1, 3, 4), np.float32)})


def score_raises(run):
    return {"accuracy": run({"x": np.ones((1, 3, 4), np.float32)})["z"]}


def score_asks_wrongly(run):
    run({"x": np.ones((1, 3, 4))})
    return {"accuracy": 1.0}


def score_own_cosine(run):
    run({"x": np.ones((1, 3, 4), np.float32)})
    return {"cosine": 1.0}


_CALLS = 0


def score_differently_each_time(run):
    global _CALLS
    _CALLS += 1
    for _ in range(_CALLS):
        run({"x": np.ones((1, 3, 4), np.float32)})
    return {"accuracy": 1.0}
