"""Temporary directories that live as long as their process."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vbpipe.store.faults import reported
from vbpipe.store.layout import Layout
from vbpipe.store.locks import flocked, flocked_now

_LOCK = ".lock"


@contextmanager
def workspace(layout: Layout) -> Iterator[Path]:
    """Yield an empty directory in the store's file system; it is gone after the block.

    Raises:
        StoreError: the store can't be written.
    """
    with ExitStack() as stack:
        with reported("write in the store", layout.root):
            layout.tmp.mkdir(parents=True, exist_ok=True)
            sweep(layout)
            folder = layout.tmp / f"{os.getpid()}-{secrets.token_hex(8)}"
            # Locked before it exists: a sweep never sees it without its owner.
            stack.enter_context(flocked(_lock(folder)))
            stack.callback(_lock(folder).unlink, missing_ok=True)
            stack.callback(remove, folder)
            folder.mkdir()
        yield folder


def sweep(layout: Layout) -> int:
    """Remove what dead processes left under `tmp`, and return how many things that were."""
    if not layout.tmp.is_dir():
        return 0
    names = {path.name.removesuffix(_LOCK) for path in layout.tmp.iterdir()}
    return sum(_sweep_one(layout.tmp / name) for name in sorted(names))


def remove(path: Path) -> None:
    """Remove a directory or file as far as the disk lets us; what stays is swept later."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sweep_one(folder: Path) -> bool:
    with flocked_now(_lock(folder)) as mine:
        if not mine:
            return False
        remove(folder)
        _lock(folder).unlink(missing_ok=True)
        return True


def _lock(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK)
