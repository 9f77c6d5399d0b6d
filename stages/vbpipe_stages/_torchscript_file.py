"""Write TorchScript programs whose bytes depend on the program alone."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def save(program: torch.jit.ScriptModule, path: Path) -> None:
    """Save `program` without debug records and without the id that is drawn from them.

    They hold this machine's source paths, and nothing needs them to load or run.
    """
    import torch

    raw = path.with_name(f"{path.name}.raw")
    torch.jit.save(program, str(raw))
    with zipfile.ZipFile(raw) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as kept:
        top = source.namelist()[0].split("/", 1)[0]
        for item in source.infolist():
            if not item.filename.endswith((".debug_pkl", "/.data/serialization_id")):
                name = item.filename.replace(f"{top}/", "model/", 1)
                kept.writestr(zipfile.ZipInfo(name), source.read(item))
    raw.unlink()
