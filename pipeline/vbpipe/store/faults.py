"""Turn what the file system refuses into a StoreError that says what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vbpipe.errors import StoreError

_FULL = "Free space there (`vbpipe store gc` removes what is no longer needed) or use a store on another disk."
_READ_ONLY = "Use a store that can be written; this one still serves what it holds."
_PERMISSION = "Give this user access to the store, or use another store."
_NOT_A_DIRECTORY = "A file is where the store needs a folder: move it away, or use another store."
_HINTS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EROFS: _READ_ONLY,
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.ENOTDIR: _NOT_A_DIRECTORY,
    errno.EEXIST: _NOT_A_DIRECTORY,
    errno.EXDEV: "A step must write under `Store.workspace()`, which is in the store's own file system.",
    errno.EIO: "The disk fails: check it, then run `vbpipe store verify`.",
}


@contextmanager
def reported(doing: str, where: Path) -> Iterator[None]:
    """Raise StoreError for an OSError of the block.

    Args:
        doing: what the block does, after "can't": "keep the result of this step".
        where: named when the OSError names no file of its own.
    """
    try:
        yield
    except OSError as error:
        place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(where)
        reason = os.strerror(error.errno) if error.errno else str(error)
        hint = _HINTS.get(error.errno or 0, "Check the disk and the permissions of the store.")
        raise StoreError(f"can't {doing}: {reason}.", where=place, hint=hint) from error
