"""What a runnable artifact takes and gives, kept beside it as `io.json` so that it opens without its recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from vbpipe.core import Spec
from vbpipe.errors import EngineError
from vbpipe.recipe.model import Dimension, Model, TensorInput
from vbpipe.samples import size_problem

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

FILE = "io.json"


class Interface(Spec):
    """Named inputs in forward()'s order, named outputs in its return order, and the profile of every symbol."""

    inputs: Mapping[str, TensorInput]
    outputs: tuple[str, ...]
    shapes: Mapping[str, Dimension] = {}

    @classmethod
    def of(cls, model: Model) -> Interface:
        """Return the interface of a recipe's model; how samples are made up is no part of it."""
        inputs = {name: TensorInput(dtype=spec.dtype, shape=spec.shape) for name, spec in model.inputs.items()}
        return cls(inputs=inputs, outputs=model.outputs, shapes=model.shapes)

    @classmethod
    def fixed(cls, arrays: Mapping[str, Array], outputs: Sequence[str]) -> Interface:
        """Return the interface of a file that came without one: it takes exactly arrays like these."""
        try:
            inputs = {
                name: TensorInput.model_validate({"dtype": str(array.dtype), "shape": array.shape})
                for name, array in arrays.items()
            }
        except ValidationError as error:
            raise EngineError(
                f"an input can't be used: {error.errors()[0]['msg']}.", hint="Correct --inputs."
            ) from error
        return cls(inputs=inputs, outputs=tuple(outputs))

    @classmethod
    def read(cls, directory: Path) -> Interface:
        """Read `io.json` in an artifact's directory; raises EngineError when there is none that can be used."""
        path = directory / FILE
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise EngineError(
                f"it does not say what the artifact takes ({error}).", where=str(path), hint="Build the artifact again."
            ) from error

    def write(self, directory: Path) -> None:
        """Write `io.json`: bytes equal for equal interfaces."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False)
        (directory / FILE).write_text(text + "\n", encoding="utf-8")

    def check(self, arrays: Mapping[str, Array]) -> None:
        """Raise EngineError for a missing, unknown, wrongly typed or wrongly shaped input."""
        missing = [name for name in self.inputs if name not in arrays]
        if missing:
            raise EngineError(f"input {missing[0]!r} is missing; got {sorted(arrays)}.")
        unknown = [name for name in arrays if name not in self.inputs]
        if unknown:
            raise EngineError(f"there is no input {unknown[0]!r}; it takes {list(self.inputs)}.")
        sizes: dict[str, int] = {}
        for name, spec in self.inputs.items():
            problem = self._problem(spec, arrays[name], sizes)
            if problem:
                raise EngineError(f"input {name!r} {problem}.")

    def _problem(self, spec: TensorInput, array: Array, sizes: dict[str, int]) -> str | None:
        """Return what keeps `array` from being this input; `sizes` collects each symbol's first size."""
        import numpy as np

        if not isinstance(array, np.ndarray):
            return f"is a {type(array).__name__}, not a numpy array"
        if str(array.dtype) != spec.dtype:
            return f"is {array.dtype}; it takes {spec.dtype}"
        if array.ndim != len(spec.shape):
            return f"has shape {list(array.shape)}; it takes {list(spec.shape)}"
        for axis, (size, wanted) in enumerate(zip(array.shape, spec.shape, strict=True)):
            problem = size_problem(self.shapes, sizes, size, wanted)
            if problem:
                return f"has shape {list(array.shape)}: axis {axis} {problem}"
        return None
