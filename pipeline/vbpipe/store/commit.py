"""Change entries and objects, one process at a time, so that a crash leaves the old state or the new one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vbpipe.store.entry import Entry, encode
from vbpipe.store.inspect import inspect, object_damage
from vbpipe.store.layout import Layout
from vbpipe.store.locks import flocked
from vbpipe.store.tree import fsync


@contextmanager
def committing(layout: Layout) -> Iterator[None]:
    """Hold the commit lock for the block; raises OSError when the store can't be written."""
    layout.locks.mkdir(parents=True, exist_ok=True)
    with flocked(layout.commit_lock):
        yield


def commit(layout: Layout, entry: Entry, source_dir: Path, scratch: Path) -> Entry:
    """Move sealed files into the store, then name them; return the entry as kept.

    Args:
        layout: the store.
        entry: what to keep; names by which its key was reached before are added to it.
        source_dir: its files, sealed; left in place when the store has the same bytes already.
        scratch: a directory in the same file system for what is being written.
    """
    with committing(layout):
        before = inspect(layout, entry.key.digest, hashed=False).entry
        kept = entry.reached_by(before.identities) if before else entry
        # Written before the object moves: a full disk is met while nothing is visible yet.
        draft = _write(scratch / "entry.json", encode(kept))
        _place(layout, kept, source_dir)
        _publish(layout, kept, draft)
    return kept


def note_identities(layout: Layout, entry: Entry, names: Iterable[str], now_s: float, scratch: Path) -> None:
    """Record in an entry that a build reached it under further names."""
    with committing(layout):
        current = inspect(layout, entry.key.digest, hashed=False).usable
        if current is not None and not current.identities.keys() >= set(names):
            named = current.reached_by(dict.fromkeys(names, now_s))
            _publish(layout, named, _write(scratch / "entry.json", encode(named)))


def set_aside(layout: Layout, path: Path) -> None:
    """Move a damaged entry or object out of the way; needs the commit lock."""
    layout.damaged.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        path.rename(layout.aside(path))


def _place(layout: Layout, entry: Entry, source_dir: Path) -> None:
    target = layout.object(entry.digest)
    if object_damage(layout, entry) is not None:
        set_aside(layout, target)
        _make_durable(layout, target.parent)
        source_dir.rename(target)
        fsync(target.parent)
    with suppress(OSError):  # age is counted from here; another user's object keeps its own
        os.utime(target)


def _publish(layout: Layout, entry: Entry, draft: Path) -> None:
    _make_durable(layout, layout.entries)
    draft.replace(layout.entry(entry.key.digest))
    fsync(layout.entries)


def _write(path: Path, text: bytes) -> Path:
    with path.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return path


def _make_durable(layout: Layout, folder: Path) -> None:
    if folder.is_dir():
        return
    if folder != layout.root:
        _make_durable(layout, folder.parent)
    folder.mkdir(parents=True, exist_ok=True)
    fsync(folder.parent)
