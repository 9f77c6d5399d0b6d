"""Make, keep and read the input arrays that a recipe describes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vbpipe.errors import VbpipeError
from vbpipe.recipe.model import Dimension, Model, Range, TensorInput

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def check_sizes(shapes: Mapping[str, Dimension]) -> tuple[dict[str, int], ...]:
    """Return the sizes at which every step is checked: the optimum, the minimum, and others inside the profile.

    Three, or as many as the profile holds. The others are odd where they can be and differ between symbols, so that a
    length baked in at export, or two axes tied by mistake, are caught.
    """
    found = [{name: dim.opt for name, dim in shapes.items()}, {name: dim.min for name, dim in shapes.items()}]
    for turn in range(4):
        found.append({name: _other(dim, turn + place) for place, (name, dim) in enumerate(shapes.items())})
    distinct = [sizes for index, sizes in enumerate(found) if sizes not in found[:index]]
    return tuple(distinct[:3])


def synthesize(model: Model, sizes: Mapping[str, int], seed: int) -> dict[str, Array]:
    """Return one made-up sample: input name to array, equal for equal arguments on every machine.

    Raises:
        VbpipeError: `sizes` lacks a symbol.
    """
    import numpy as np

    generator = np.random.Generator(np.random.PCG64(seed))
    return {name: _fill(name, spec, sizes, generator) for name, spec in model.inputs.items()}


def describe(sizes: Mapping[str, int]) -> str:
    """Return the scenario name of these sizes: "batch=1,seq=128"; "fixed" where nothing is symbolic."""
    return ",".join(f"{name}={size}" for name, size in sizes.items()) or "fixed"


def misfit(model: Model, sample: Mapping[str, Array]) -> str | None:
    """Return what keeps `sample` from being an input of the model (name, dtype, rank, size, NaN), or None."""
    import numpy as np

    if set(sample) != set(model.inputs):
        return f"it holds {sorted(sample)}; the recipe's inputs are {sorted(model.inputs)}"
    sizes: dict[str, int] = {}
    for name, spec in model.inputs.items():
        array = sample[name]
        if not isinstance(array, np.ndarray):
            return f"{name} is a {type(array).__name__}, not a numpy array"
        if str(array.dtype) != spec.dtype:
            return f"{name} is {array.dtype}; the recipe says {spec.dtype}"
        if len(array.shape) != len(spec.shape):
            return f"{name} has shape {list(array.shape)}; the recipe says {list(spec.shape)}"
        for axis, (size, wanted) in enumerate(zip(array.shape, spec.shape, strict=True)):
            problem = size_problem(model.shapes, sizes, size, wanted)
            if problem:
                return f"{name} has shape {list(array.shape)}: axis {axis} {problem}"
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            return f"{name} holds NaN or infinity"
    return None


def size_problem(shapes: Mapping[str, Dimension], sizes: dict[str, int], size: int, wanted: int | str) -> str | None:
    """Return what keeps `size` from being the size or symbol `wanted`, or None.

    `sizes` collects each symbol's first size, which all its others must equal.
    """
    if isinstance(wanted, int):
        return None if size == wanted else f"is {size}, not {wanted}"
    if sizes.setdefault(wanted, size) != size:
        return f"is {size}, but {wanted} is {sizes[wanted]} in another input or axis"
    dim = shapes.get(wanted)
    if dim is not None and not dim.min <= size <= dim.max:
        return f"is {size}, outside the profile of {wanted} ({dim.min}..{dim.max})"
    return None


def save(path: Path, rows: Sequence[Mapping[str, Array]]) -> None:
    """Write rows of named arrays as one safetensors file, bytes equal for equal rows."""
    import numpy as np
    from safetensors.numpy import save_file

    flat = {
        f"{index:06d}/{name}": np.ascontiguousarray(array)
        for index, row in enumerate(rows)
        for name, array in row.items()
    }
    save_file(flat, str(path), metadata={"rows": str(len(rows))})


def save_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write named arrays as a plain safetensors file."""
    import numpy as np
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, str(path))


def load_arrays(path: Path) -> dict[str, Array]:
    """Read what `save_arrays` wrote."""
    from safetensors.numpy import load_file

    return dict(load_file(str(path)))


def load(path: Path) -> list[dict[str, Array]]:
    """Read what `save` wrote, arrays in the order of their names.

    Raises:
        VbpipeError: the file is missing or is no such file.
    """
    from safetensors import SafetensorError, safe_open

    rows: list[dict[str, Array]] = []
    try:
        with safe_open(str(path), framework="numpy") as file:
            rows.extend({} for _ in range(int((file.metadata() or {}).get("rows", "0"))))
            for key in sorted(file.keys()):
                index, name = key.split("/", 1)
                rows[int(index)][name] = file.get_tensor(key)
    except (OSError, SafetensorError, ValueError, IndexError) as error:
        raise VbpipeError(f"it holds no samples ({error}).", where=str(path)) from error
    return rows


def total_bytes(rows: Iterable[Mapping[str, Array]]) -> int:
    """Return how many bytes of array data the rows hold."""
    return sum(array.nbytes for row in rows for array in row.values())


def _other(dim: Dimension, turn: int) -> int:
    """Return a size inside the profile, beyond the optimum where there is room, another for each of a few turns."""
    wanted = dim.opt + max(1, dim.opt // 3)
    wanted += 1 - wanted % 2 + 2 * turn
    return wanted if wanted <= dim.max else dim.min + (turn + (dim.max - dim.min) // 2) % (dim.max - dim.min + 1)


def _fill(name: str, spec: TensorInput, sizes: Mapping[str, int], generator: np.random.Generator) -> Array:
    import numpy as np

    missing = [dim for dim in spec.shape if isinstance(dim, str) and dim not in sizes]
    if missing:
        raise VbpipeError(f"input {name!r} needs a size for {missing[0]!r}.", where="model.shapes")
    shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape)
    dtype = np.dtype(spec.dtype)
    if spec.values == "ones":
        return np.ones(shape, dtype)
    if spec.values == "zeros":
        return np.zeros(shape, dtype)
    if isinstance(spec.values, Range):
        low, high = spec.values.low, spec.values.high
        if dtype.kind in "iub":
            return generator.integers(int(low), int(high), shape).astype(dtype)
        return generator.uniform(low, high, shape).astype(dtype)
    if dtype.kind in "iub":
        return generator.integers(0, 2, shape).astype(dtype)
    return generator.standard_normal(shape).astype(dtype)
