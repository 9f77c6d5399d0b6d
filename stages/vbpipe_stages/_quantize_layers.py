"""Say for each module of a PyTorch model what the rules of `quantize` would make of it, before anything is exported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vbpipe.core import LayerChoice
from vbpipe.recipe.model import Model
from vbpipe_stages import _torch_model
from vbpipe_stages._quantize_plan import Asked
from vbpipe_stages._quantize_rules import Choice, Described, misfit

if TYPE_CHECKING:
    import torch


_LINEAR = ("MatMul", "Gemm")


@dataclass(frozen=True)
class WeightedModule:
    """A module whose weight can be quantized.

    Args:
        path: in `named_modules()`.
        kind: its class.
        operators: what exporters may write for it.
        inputs: how many values one output of a linear layer sums up; the rows of a table.
        shares: the path of an earlier module with the same weight, else empty.
    """

    path: str
    kind: str
    operators: tuple[str, ...]
    inputs: int
    shares: str = ""

    def described(self) -> list[Described]:
        """Return it as rules see it, once for each operator."""
        return [Described("", self.path, (self.kind,), operator) for operator in self.operators]


@dataclass(frozen=True)
class Modules:
    """The modules of a model in its order: path to class of all, and those with a weight that can be quantized."""

    classes: Mapping[str, str]
    weighted: tuple[WeightedModule, ...]


def weighted_modules(model: Model, root: Path) -> Modules:
    """Build the model and list its modules; raises VbpipeError where it can't be built."""
    module = _torch_model.load(model, root).module
    classes: dict[str, str] = {}
    weighted: list[WeightedModule] = []
    owners: dict[int, str] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        kind = type(part).__name__
        classes[path] = kind
        found = _operators(part)
        if found is None:
            continue
        address = part.weight.data_ptr()
        # Exporters write a linear layer's weight the other way round; transformers' Conv1D has it so already.
        inputs = int(part.weight.shape[1 if found == _LINEAR and kind != "Conv1D" else 0])
        weighted.append(WeightedModule(path, kind, found, inputs, owners.get(address, "")))
        owners.setdefault(address, path)
    return Modules(classes, tuple(weighted))


def layer_choice(module: WeightedModule, choice: Choice, asked: Asked) -> LayerChoice:
    """Return what the module gets, and what will keep it from that."""
    rule = "default" if choice.rule is None else f"rules[{choice.rule}] {asked.rules[choice.rule].describe()}"
    shared = f"shares its weight with {module.shares}" if module.shares else ""

    def told(gets: str, note: str = "") -> LayerChoice:
        return LayerChoice(module.path, module.kind, rule, gets, "; ".join(filter(None, (note, shared))))

    precision, high = choice.precision, asked.lowering.high(choice.precision)
    rest = "float" if high == "fp32" else high
    if module.operators == ("Gather",):
        names = choice.rule is not None and asked.rules[choice.rule].names_table(module.described()[0])
        if precision is None or not names:
            note = "a table is quantized only where a rule names its class or Gather"
            return told(rest, note if choice.rule is None and precision is not None else "")
    if precision is None:
        return told("float")
    op = module.operators[0]
    problem = misfit(precision, op, module.inputs)
    if problem and op == "Conv" and choice.rule is None:
        return told(rest, problem)
    return told(asked.form(precision, op, choice.rule).describe(), f"refused: {problem}" if problem else "")


def _operators(part: torch.nn.Module) -> tuple[str, ...] | None:
    """Return what exporters write for a module of this class; None where it has no weight that can be quantized."""
    import torch

    if isinstance(part, torch.nn.Linear) or type(part).__name__ == "Conv1D":  # transformers' linear layer of GPT-2
        return _LINEAR
    if isinstance(part, (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)):
        return ("Conv",)
    if isinstance(part, torch.nn.Embedding):
        return ("Gather",)
    return None
