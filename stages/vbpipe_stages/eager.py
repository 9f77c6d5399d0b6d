"""Run the recipe's model in PyTorch, and record what everything after it is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vbpipe import samples
from vbpipe.core import Inputs, Meta, Site, Spec, Stage
from vbpipe.errors import EngineError, VbpipeError
from vbpipe.recipe.model import Model, Recipe, Target
from vbpipe_stages import _torch_model
from vbpipe_stages._reference import OUTPUTS, ModuleRow, Reference, read_sizes
from vbpipe_stages._user_code import blame, dependencies, installed

if TYPE_CHECKING:
    import numpy as np
    import torch

    Row = dict[str, np.ndarray[Any, Any]]


class Eager(Spec):
    """Write `reference.safetensors` (eager's outputs on every check sample) and `model.json`."""

    name: ClassVar[str] = "eager"
    version: ClassVar[int] = 1
    scope: ClassVar[Literal["chain", "each", "target"]] = "chain"
    after: ClassVar[tuple[str, ...]] = ("samples",)

    model: Model

    @classmethod
    def configure(cls, recipe: Recipe, target: Target) -> tuple[Stage, ...]:
        """Return the one step."""
        del target
        return (cls(model=recipe.model),)

    def label(self) -> str:
        """Return "eager"."""
        return self.name

    def consumes(self) -> frozenset[str]:
        """Return "samples"."""
        return frozenset({"samples"})

    def produces(self) -> str:
        """Return "reference"."""
        return "reference"

    def fingerprint(self, root: Path) -> Mapping[str, str]:
        """Return torch's version and the digests of the factory's source."""
        return {**dependencies(self.model.factory, self.model, root), "torch": installed("torch")}

    def run(self, inputs: Inputs, out: Path, site: Site) -> Meta:
        """Run every check sample, twice the first one.

        Raises:
            VbpipeError: the model can't be loaded, raises at a size of its profile, or returns NaN, infinity, no
                tensors or another number of them.
        """
        folder = inputs["samples"].path
        rows, sizes = samples.load(folder / "check.safetensors"), read_sizes(folder)
        loaded = _torch_model.load(self.model, site.root)
        outputs: list[Row] = []
        # One thread always: the number of threads moves the last bits, and must not change what is in the store.
        with _torch_model.torch_threads(1):
            for index, row in enumerate(rows):
                site.progress(index / len(rows), f"eager at {samples.describe(sizes[index])}")
                outputs.append(self._run(loaded, row, sizes, index, site.root))
            steady = _same(_torch_model.run(loaded.adapter, self.model, rows[0]), outputs[0])
            changed = self._changed_inputs(loaded, rows[0])
        ordered = [{name: row[name] for name in self.model.outputs} for row in outputs]
        samples.save(out / OUTPUTS, ordered)
        reference = self._describe(loaded, outputs[0], steady=steady, changed=changed)
        reference.write(out)
        return {
            "parameters": reference.parameters,
            "weights_sha256": reference.weights_sha256,
            "output_dtypes": dict(reference.output_dtypes),
            "train_mode_fixed": loaded.train_mode_fixed,
            "deterministic": steady,
            "notes": list(reference.notes),
        }

    def _run(
        self, loaded: _torch_model.Loaded, row: Row, sizes: Sequence[Mapping[str, int]], index: int, root: Path
    ) -> Row:
        import numpy as np

        at = samples.describe(sizes[index])
        with blame(f"forward() at {at}", root, where=self.model.factory, hint=self._size_hint(sizes[index], index)):
            found = _torch_model.run(loaded.adapter, self.model, row)
        for name, array in found.items():
            if str(array.dtype) not in _DTYPES:
                raise EngineError(f"output {name!r} is {array.dtype}, which is not supported.", where="model.outputs")
            bad = int((~np.isfinite(array)).sum()) if array.dtype.kind == "f" else 0
            if bad:
                raise VbpipeError(
                    f"output {name!r} holds {bad} of {array.size} values that are NaN or infinite, in eager, at {at}.",
                    where=self.model.factory,
                    hint="Check the weights and `values` of model.inputs; nothing can be compared with NaN.",
                )
        return {name: np.array(array) for name, array in found.items()}  # an output may alias the model's memory

    def _size_hint(self, sizes: Mapping[str, int], index: int) -> str:
        """Samples before `index` went well; the first one has the optimal sizes."""
        small = [n for n, dim in self.model.shapes.items() if sizes.get(n) == dim.min and dim.min < dim.opt]
        if not index or not small:
            return "Check model.inputs: names, dtypes, shapes and `values` (token ids must be below the vocabulary)."
        keys = " or ".join(f"`shapes.{name}.min`" for name in small)
        return f"Larger sizes work: raise {keys} if an input smaller than a window is the reason."

    def _changed_inputs(self, loaded: _torch_model.Loaded, row: Row) -> tuple[str, ...]:
        """Return the inputs that forward() changes in place."""
        import torch

        tensors = {name: torch.from_numpy(row[name].copy()) for name in self.model.inputs}
        with torch.inference_mode():
            loaded.adapter(*tensors.values())
        return tuple(name for name in tensors if not _same({name: tensors[name].numpy()}, {name: row[name]}))

    def _describe(
        self, loaded: _torch_model.Loaded, outputs: Row, *, steady: bool, changed: tuple[str, ...]
    ) -> Reference:
        model = self.model
        return Reference(
            factory=model.factory,
            args=model.args,
            inputs=model.inputs,
            outputs=model.outputs,
            shapes=model.shapes,
            output_dtypes={name: str(outputs[name].dtype) for name in model.outputs},
            parameters=sum(parameter.numel() for parameter in loaded.module.parameters()),
            weights_sha256=_torch_model.weights_sha256(loaded.module),
            modules=tuple(_modules(loaded.module)),
            train_mode_fixed=loaded.train_mode_fixed,
            changes_inputs=changed,
            notes=tuple(_notes(loaded.train_mode_fixed, steady, changed)),
        )


_DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")


def _same(left: Row, right: Row) -> bool:
    import numpy as np

    return all(np.array_equal(left[n], right[n], equal_nan=left[n].dtype.kind == "f") for n in left)


def _modules(module: torch.nn.Module) -> Iterator[ModuleRow]:
    for path, part in module.named_modules():
        kind = getattr(part, "original_name", type(part).__name__)  # a ScriptModule keeps the name of its class
        yield ModuleRow(path=path, type=kind, parameters=sum(p.numel() for p in part.parameters(recurse=False)))


def _notes(train_mode_fixed: bool, steady: bool, changed: tuple[str, ...]) -> Iterator[str]:
    if train_mode_fixed:
        yield "the factory returned the model in train mode; it is run, exported and measured in eval mode"
    if not steady:
        yield "not deterministic: two runs of the same input differ, so no step can be compared exactly"
    if changed:
        yield f"forward() changes its inputs in place ({', '.join(changed)}); it is given copies"


PLUGIN: type[Stage] = Eager
