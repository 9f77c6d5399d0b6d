"""Read and write files of named arrays for the command line."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vbpipe.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def read_arrays(path: Path) -> dict[str, Array]:
    """Read named arrays from a .npz or .safetensors file; raises UsageError for anything else."""
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not path.is_file():
        raise UsageError("there is no such file.", where=str(path))
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        return dict(load_file(str(path)))
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(
            f"it holds no named arrays ({error}).", where=str(path), hint="Use .safetensors or .npz."
        ) from error


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write named arrays as .npz or .safetensors; raises UsageError when the file can't be written."""
    import numpy as np
    from safetensors.numpy import save_file

    try:
        if path.suffix == ".npz":
            with zipfile.ZipFile(path, "w") as archive:  # np.savez takes no array of the name "file"
                for name, array in arrays.items():
                    with archive.open(f"{name}.npy", "w") as member:
                        np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
        else:
            save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, str(path))
    except OSError as error:
        raise UsageError(f"it can't be written: {error.strerror or error}.", where=str(path)) from error
