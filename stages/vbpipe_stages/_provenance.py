"""Where each part of an ONNX graph comes from in the PyTorch module, kept beside it as `provenance.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from vbpipe.core import Spec
from vbpipe.errors import VbpipeError

FILE = "provenance.json"


class Provenance(Spec):
    """Paths are those of `model.named_modules()` and `model.named_parameters()` of the recipe's own model."""

    nodes: Mapping[str, str] = {}
    """First output tensor of a node to the path of the module that it computes; "" is the model itself."""
    parts: Mapping[str, tuple[str, ...]] = {}
    """First output tensor of a fused node to all modules that it computes, where they are several."""
    classes: Mapping[str, str] = {}
    """Module path to the module's class name."""
    parameters: Mapping[str, str] = {}
    """Initializer to the parameter or buffer that it holds, maybe transposed; absent where not known."""

    @classmethod
    def read(cls, directory: Path) -> Provenance:
        """Read `provenance.json` in an artifact's directory; everything is empty where there is none."""
        path = directory / FILE
        if not path.exists():
            return cls()
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise VbpipeError(f"it is no provenance file ({error}).", where=str(path)) from error

    def write(self, directory: Path) -> None:
        """Write `provenance.json`: sorted, so that equal graphs give equal bytes."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True, ensure_ascii=False)
        (directory / FILE).write_text(text + "\n", encoding="utf-8")

    def class_of(self, tensor: str) -> str:
        """Return the class name of the module that computes `tensor`; "" where not known."""
        return self.classes.get(self.nodes.get(tensor, "?"), "")

    def modules_of(self, tensor: str) -> tuple[str, ...]:
        """Return every module that the node which makes `tensor` computes; empty where not known."""
        found = self.parts.get(tensor)
        if found is not None:
            return found
        module = self.nodes.get(tensor)
        return () if module is None else (module,)
