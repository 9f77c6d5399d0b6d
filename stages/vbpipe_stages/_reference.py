"""What a "reference" artifact says about the recipe's model, kept as `model.json` beside eager's outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from vbpipe import samples
from vbpipe.core import Spec
from vbpipe.errors import EngineError, VbpipeError
from vbpipe.recipe.model import Dimension, Model, TensorInput

if TYPE_CHECKING:
    import numpy as np

    Row = dict[str, np.ndarray[Any, Any]]

FILE = "model.json"
OUTPUTS = "reference.safetensors"


class ModuleRow(Spec):
    """One entry of `named_modules()`; `parameters` counts its own, without those of the modules inside it."""

    path: str
    type: str
    parameters: int


class Reference(Spec):
    """The model behind a "reference" artifact: enough to build it again, and facts to compare steps with."""

    factory: str
    args: Mapping[str, Any]
    inputs: Mapping[str, TensorInput]
    outputs: tuple[str, ...]
    shapes: Mapping[str, Dimension]
    output_dtypes: Mapping[str, str]
    parameters: int
    weights_sha256: str
    modules: tuple[ModuleRow, ...]
    train_mode_fixed: bool
    changes_inputs: tuple[str, ...]
    """Inputs that forward() changes in place; whoever runs the model hands it copies."""
    notes: tuple[str, ...]

    @classmethod
    def read(cls, directory: Path) -> Reference:
        """Read `model.json` in an artifact's directory; raises EngineError when there is none that can be used."""
        path = directory / FILE
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise EngineError(
                f"it does not describe a model ({error}).", where=str(path), hint="Build the reference again."
            ) from error

    def write(self, directory: Path) -> None:
        """Write `model.json`: bytes equal for equal models. Inputs keep forward()'s order, so keys aren't sorted."""
        found = self.model_dump(mode="json")
        for name in ("args", "shapes", "output_dtypes"):
            found[name] = json.loads(json.dumps(found[name], sort_keys=True))
        (directory / FILE).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @property
    def model(self) -> Model:
        """Return the model as a recipe describes it."""
        return Model(factory=self.factory, args=self.args, inputs=self.inputs, outputs=self.outputs, shapes=self.shapes)

    def expected(self, directory: Path) -> list[Row]:
        """Return eager's outputs on the check samples, each row in the order of `outputs`."""
        path = directory / OUTPUTS
        rows = samples.load(path)
        if any(set(row) != set(self.outputs) for row in rows):
            raise VbpipeError(f"it does not hold the outputs {list(self.outputs)}.", where=str(path))
        return [{name: row[name] for name in self.outputs} for row in rows]


def read_sizes(directory: Path) -> list[dict[str, int]]:
    """Return the symbol sizes of every check sample of a "samples" artifact."""
    rows = json.loads((directory / "sizes.json").read_text(encoding="utf-8"))["check"]
    return [{str(name): int(size) for name, size in row["sizes"].items()} for row in rows]
