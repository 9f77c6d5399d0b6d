"""Collect the samples on which every step of a variant is checked and calibrated."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vbpipe import samples
from vbpipe.core import Inputs, Meta, Site, Spec, Stage
from vbpipe.errors import VbpipeError
from vbpipe.recipe.model import Data, Model, Recipe, Target
from vbpipe.recipe.references import resolve
from vbpipe_stages._user_code import blame, dependencies, seed

if TYPE_CHECKING:
    import numpy as np

    Row = dict[str, np.ndarray[Any, Any]]

REAL_CHECKS = 4
"""So many real samples join the made-up ones that every step is checked on."""
MADE_UP = 8
"""So many samples are made up at the optimum where the recipe has no calibration function."""


class Samples(Spec):
    """Write `check.safetensors`, `calibration.safetensors` and `sizes.json`."""

    name: ClassVar[str] = "samples"
    version: ClassVar[int] = 1
    scope: ClassVar[Literal["chain", "each", "target"]] = "chain"
    after: ClassVar[tuple[str, ...]] = ()

    model: Model
    data: Data = Data()

    @classmethod
    def configure(cls, recipe: Recipe, target: Target) -> tuple[Stage, ...]:
        """Return the one step; what doesn't matter to samples is blanked, so that changing it keeps them cached."""
        del target
        model = recipe.model.model_copy(update={"factory": "none:none", "args": {}, "outputs": ("none",)})
        return (cls(model=model, data=recipe.data.model_copy(update={"evaluation": None})),)

    def label(self) -> str:
        """Return "samples"."""
        return self.name

    def consumes(self) -> frozenset[str]:
        """Return nothing: samples start a chain."""
        return frozenset()

    def produces(self) -> str:
        """Return "samples"."""
        return "samples"

    def fingerprint(self, root: Path) -> Mapping[str, str]:
        """Return the digests of the calibration function's source."""
        if self.data.calibration is None:
            return {}
        return dependencies(self.data.calibration, self.model, root)

    def run(self, inputs: Inputs, out: Path, site: Site) -> Meta:
        """Write the samples.

        Raises:
            VbpipeError: the calibration function raises, yields nothing, or yields what the model doesn't take.
        """
        del inputs
        sizes = samples.check_sizes(self.model.shapes)
        made_up = [samples.synthesize(self.model, each, index) for index, each in enumerate(sizes)]
        real = self._read_real(site)
        calibration = real or self._make_up_calibration()
        checks = [*made_up, *real[:REAL_CHECKS]]
        samples.save(out / "check.safetensors", checks)
        samples.save(out / "calibration.safetensors", calibration)
        described = [
            {"source": "made up" if index < len(made_up) else "real", "sizes": _sizes(self.model, row)}
            for index, row in enumerate(checks)
        ]
        (out / "sizes.json").write_text(json.dumps({"check": described}, indent=1) + "\n", encoding="utf-8")
        return {
            "check": len(checks),
            "check_real": len(checks) - len(made_up),
            "calibration": "real" if real else "made up",
            "calibration_samples": len(calibration),
        }

    def _read_real(self, site: Site) -> list[Row]:
        reference, limit = self.data.calibration, self.data.samples
        if reference is None:
            return []
        found: list[Row] = []
        for index, item in enumerate(_items(reference, site.root, limit)):
            row = _row(item, f"{reference}: sample {index}")
            problem = samples.misfit(self.model, row)
            if problem:
                raise VbpipeError(f"{problem}.", where=f"{reference}: sample {index}", hint=_CONTRACT)
            found.append({name: row[name] for name in self.model.inputs})
            site.progress((index + 1) / limit, f"calibration sample {index + 1}")
        if not found:
            raise VbpipeError("it yields no sample.", where=reference, hint=_CONTRACT)
        return found

    def _make_up_calibration(self) -> list[Row]:
        optimum = {name: dim.opt for name, dim in self.model.shapes.items()}
        return [samples.synthesize(self.model, optimum, 1000 + index) for index in range(MADE_UP)]


_CONTRACT = "It must give mappings of every input's name to a numpy array of the recipe's dtype and shape."


def _items(reference: str, root: Path, limit: int) -> Iterator[object]:
    """Yield at most `limit` samples, so that a generator without an end is fine."""
    function = resolve(reference, root)
    what = f"data.calibration {reference}"
    seed()
    with blame(what, root, where=reference):
        made = function()
    if not isinstance(made, Iterable):
        raise VbpipeError(f"it returned a {type(made).__name__}.", where=reference, hint="Return or yield samples.")
    if isinstance(made, Mapping):
        raise VbpipeError("it returned one mapping.", where=reference, hint="Return a list of them, or yield each.")
    iterator = iter(made)
    for _ in range(limit):
        with blame(what, root, where=reference):
            item = next(iterator, _END)
        if item is _END:
            return
        yield item


_END = object()


def _row(item: object, where: str) -> Row:
    """Return copies of a sample's arrays: a generator may fill one buffer again and again."""
    import numpy as np

    if not isinstance(item, Mapping):
        raise VbpipeError(f"it is a {type(item).__name__}, not a mapping.", where=where, hint=_CONTRACT)
    tensors = {str(n): v.detach().cpu().numpy() if hasattr(v, "detach") else v for n, v in item.items()}
    return {name: np.array(value) if isinstance(value, np.ndarray) else value for name, value in tensors.items()}


def _sizes(model: Model, row: Row) -> dict[str, int]:
    pairs = itertools.chain.from_iterable(
        zip(spec.shape, row[name].shape, strict=True) for name, spec in model.inputs.items()
    )
    return {symbol: size for symbol, size in pairs if isinstance(symbol, str)}


PLUGIN: type[Stage] = Samples
