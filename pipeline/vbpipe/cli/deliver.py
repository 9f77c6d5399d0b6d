"""Put a build's reports and bundles where users look for them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vbpipe.core import Artifact
from vbpipe.errors import UsageError
from vbpipe.report import as_markdown
from vbpipe.runtime import MANIFEST

PREVIOUS = "bundle.previous"


def deliver_bundle(artifact: Artifact | None, folder: Path) -> str | None:
    """Copy the bundle out of the store to `folder`/bundle, replacing what is there; None when there is none.

    A bundle of an earlier build would be taken for this one's, so it is moved to bundle.previous when there is none.

    Raises:
        UsageError: the folder can't be written.
    """
    place = folder / "bundle"
    try:
        if artifact is None or artifact.meta.get("shipped") is None:
            if place.exists():
                shutil.rmtree(folder / PREVIOUS, ignore_errors=True)
                place.rename(folder / PREVIOUS)
            return None
        if not _same(artifact.path, place):
            _replace(artifact.path, place)
    except OSError as error:
        raise UsageError(f"the bundle can't be written: {error.strerror}.", where=str(place)) from error
    return str(place)


def write_reports(report: Mapping[str, Any], folder: Path) -> Path:
    """Write report.json and report.md into `folder` and return the path of the first."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "report.md", as_markdown(report))
        _write(folder / "report.json", json.dumps(report, indent=1, default=str) + "\n")
    except OSError as error:
        raise UsageError(f"the report can't be written: {error.strerror}.", where=str(folder)) from error
    return folder / "report.json"


def _same(stored: Path, place: Path) -> bool:
    """Return whether `place` is this bundle: the manifest, which holds every digest, and every file's size."""
    try:
        if (stored / MANIFEST).read_bytes() != (place / MANIFEST).read_bytes():
            return False
        sizes = [{p.relative_to(r): p.stat().st_size for p in r.rglob("*") if p.is_file()} for r in (stored, place)]
    except OSError:
        return False
    return sizes[0] == sizes[1]


def _replace(stored: Path, place: Path) -> None:
    part = place.with_name(f".{place.name}.{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    # The store's files are read-only; a delivered bundle belongs to the user.
    shutil.copytree(stored, part, copy_function=shutil.copyfile)
    old = place.with_name(f".{place.name}.{os.getpid()}.old")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    part.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
