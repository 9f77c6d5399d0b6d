"""`vbpipe run`: check a bundle, open it, run it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vbpipe import runtime
from vbpipe.cli.arrays import read_arrays, write_arrays
from vbpipe.cli.terminal import print_json, stdout
from vbpipe.errors import EngineError, UsageError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def run_once(path: Path, inputs: Path | None, outputs: Path | None, threads: int | None, *, as_json: bool) -> None:
    """Run the bundle on its golden samples, which it must answer as when it was packaged, then on `inputs`.

    Raises:
        BundleError: it is damaged, or answers otherwise.
        EngineError: the inputs don't fit.
        UsageError: a file can't be read or written.
    """
    if outputs is not None and inputs is None:
        raise UsageError("there are no outputs without --inputs.", where="--outputs")
    asked = read_arrays(inputs) if inputs is not None else None
    began = time.perf_counter()
    with runtime.load(path, threads=threads) as bundle:
        opened_s = time.perf_counter() - began
        golden = bundle.check_golden()
        answers = _answers(bundle, asked) if asked is not None else {}
    if outputs is not None:
        write_arrays(outputs, answers)
    facts = {
        "bundle": str(path),
        "row": bundle.manifest.row,
        "backend": bundle.manifest.runner.backend,
        "opened_s": round(opened_s, 3),
        "golden": {"samples": golden.samples, "equal": golden.max_abs == 0.0, "max_abs": golden.max_abs},
        "outputs": {name: {"shape": list(a.shape), "dtype": str(a.dtype)} for name, a in answers.items()},
    }
    if as_json:
        print_json(facts)
        return
    console = stdout()
    closeness = "equal to" if golden.max_abs == 0.0 else f"within {golden.max_abs:.2g} of"
    console.print(f"{path}: {bundle.manifest.row} on {bundle.manifest.runner.backend}", markup=False)
    console.print(f"golden: {golden.samples} samples answered, {closeness} the packaged outputs", markup=False)
    for name, array in answers.items():
        console.print(f"{name}: {array.dtype} {list(array.shape)}", markup=False)
    if outputs is not None:
        console.print(f"written: {outputs}", markup=False)


def _answers(bundle: runtime.Bundle, asked: Mapping[str, Array]) -> dict[str, Array]:
    try:
        return bundle.run(asked)
    except EngineError as error:
        # The golden samples have just run: it is the user's inputs that don't fit.
        raise UsageError(error.what, where="--inputs", hint=error.hint) from error
