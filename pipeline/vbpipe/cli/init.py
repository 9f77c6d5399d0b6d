"""`vbpipe init`: write a first recipe from what a factory's model looks like."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vbpipe.cli.terminal import stdout
from vbpipe.errors import UsageError
from vbpipe.recipe.references import resolve

_TOKEN_NAMES = re.compile(r"(ids|tokens?|mask|positions?|indices|index|labels?)$")


@dataclass(frozen=True)
class _Guess:
    """One input as far as the model tells; `why` is printed beside it, for the user to confirm."""

    name: str
    dtype: str
    shape: tuple[str, ...]
    values: str
    why: str


def write_recipe(factory: str, out: Path) -> None:
    """Build the model, guess its inputs, and write a commented recipe to `out`.

    Raises:
        UsageError: the file exists, or the factory can't be found, called, or used.
    """
    if out.exists():
        raise UsageError("it exists already.", where=str(out), hint="Give another --out, or remove it.")
    if ":" not in factory:
        raise UsageError("it names no function.", where=factory, hint=f"Write it as {factory}:build.")
    root = out.parent.resolve()
    module = _call(resolve(factory, root), factory)
    guesses = tuple(_guesses(module))
    if not guesses:
        raise UsageError("forward() takes no inputs that a recipe could name.", where=factory)
    text = _text(_recipe_name(out, factory), factory, module, guesses)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"it can't be written: {error.strerror}.", where=str(out)) from error
    console = stdout()
    console.print(f"{out}: written. Confirm what is marked 'guessed', then: vbpipe check {out}", markup=False)


def _call(build: Any, factory: str) -> Any:
    try:
        module = build()
    except TypeError as error:
        raise UsageError(
            f"it can't be called without arguments: {error}.", where=factory, hint="Give the arguments defaults."
        ) from error
    if not callable(getattr(module, "forward", None)) or not hasattr(module, "named_modules"):
        raise UsageError(f"it returned a {type(module).__name__}, not an nn.Module.", where=factory)
    return module


def _guesses(module: Any) -> Iterator[_Guess]:
    first = True
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is not parameter.empty:
            continue
        yield _guess(parameter.name, module, first=first)
        first = False


def _guess(name: str, module: Any, *, first: bool) -> _Guess:
    layers = [(type(layer).__name__, layer) for _, layer in module.named_modules()]
    if _TOKEN_NAMES.search(name):
        rows = next((layer.num_embeddings for kind, layer in layers if kind == "Embedding"), 1000)
        values = "ones" if name.endswith("mask") else f"{{low: 0, high: {rows}}}"
        return _Guess(name, "int64", ("batch", "seq"), values, "by its name")
    for kind, layer in layers if first else ():  # the first layers say nothing of further inputs
        if kind == "Embedding":
            return _Guess(
                name, "int64", ("batch", "seq"), f"{{low: 0, high: {layer.num_embeddings}}}", "from Embedding"
            )
        if kind == "Conv2d":
            return _Guess(name, "float32", ("batch", str(layer.in_channels), "224", "224"), "normal", "from Conv2d")
        if kind == "Conv1d":
            return _Guess(name, "float32", ("batch", str(layer.in_channels), "length"), "normal", "from Conv1d")
        if kind == "Linear":
            return _Guess(name, "float32", ("batch", str(layer.in_features)), "normal", "from Linear")
        if kind in ("LSTM", "GRU", "RNN"):
            return _Guess(name, "float32", ("batch", "seq", str(layer.input_size)), "normal", f"from {kind}")
    return _Guess(name, "float32", ("batch", "8"), "normal", "nothing tells")


_PROFILES: Mapping[str, str] = {
    "batch": "{min: 1, opt: 1, max: 8}",
    "seq": "{min: 2, opt: 128, max: 512}",
    "length": "{min: 64, opt: 1024, max: 4096}",
}


def _text(name: str, factory: str, module: Any, guesses: tuple[_Guess, ...]) -> str:
    inputs = "\n".join(
        f"    {g.name}: {{dtype: {g.dtype}, shape: [{', '.join(g.shape)}], values: {g.values}}}  # guessed {g.why}"
        for g in guesses
    )
    symbols = dict.fromkeys(size for g in guesses for size in g.shape if not size.isdigit())
    shapes = "\n".join(f"    {symbol}: {_PROFILES[symbol]}" for symbol in symbols)
    parameters = sum(p.numel() for p in module.parameters())
    source = factory.rpartition(":")[0]
    return f"""# {type(module).__name__}, {parameters:,} parameters. Confirm what is marked "guessed".
recipe: 1
name: {name}
model:
  factory: {factory}
  inputs:  # in forward()'s order
{inputs}
  outputs: [output]  # guessed: one name for each tensor that forward() returns
  shapes:  # the sizes that the engine must take; opt is the one it is tuned for
{shapes}
# data:
#   calibration: {source}:samples    # () -> iterable of {{input: array}}; int8 with real ranges needs it
#   evaluation: {source}:evaluate    # (run) -> {{metric: float}}
variants:  # the first is the reference
  standard: {{}}
  int8: {{stages.quantize.default: {{weight: int8, calibration: dynamic}}}}
targets:
  cpu: {{backend: onnxruntime, threads: 1}}
stages:
  export: {{formats: [torchscript, onnx]}}
  fuse: {{level: all}}
gates:
  - {{metric: speedup, over: eager, min: 1.0}}
  - {{metric: cosine, min: 0.99}}
"""


def _recipe_name(out: Path, factory: str) -> str:
    name = out.stem if out.stem != "recipe" else Path(factory.split(":")[0]).stem
    return re.sub(r"[^A-Za-z0-9._-]", "-", name) or "model"
