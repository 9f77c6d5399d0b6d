"""Look at what the store holds for a key, and change nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vbpipe.errors import StoreDamaged
from vbpipe.store.entry import Entry, decode
from vbpipe.store.layout import Layout
from vbpipe.store.tree import first_difference


@dataclass(frozen=True)
class Damage:
    """A stored file that is not as it was stored.

    `path` is the file, `owner` the entry or object that can't be used because of it.
    """

    path: Path
    problem: str
    owner: Path

    def __str__(self) -> str:
        return f"{self.path} {self.problem}"


@dataclass(frozen=True)
class Inspection:
    """What there is for a key: an entry that can be used, an entry with damage, damage alone, or nothing."""

    entry: Entry | None
    damage: Damage | None

    @property
    def usable(self) -> Entry | None:
        return None if self.damage else self.entry


def inspect(layout: Layout, key_digest: str, *, hashed: bool = True) -> Inspection:
    """Return what the store holds for a key.

    Args:
        layout: the store.
        key_digest: the digest of the cache key.
        hashed: False takes the bytes of the files on trust and compares names and sizes only.

    Raises:
        OSError: it can't be read for a reason other than damage.
    """
    found = read_entry(layout.entry(key_digest))
    if found is None:
        return Inspection(None, None)
    if isinstance(found, Damage):
        return Inspection(None, found)
    return Inspection(found, object_damage(layout, found, hashed=hashed))


def read_entry(path: Path) -> Entry | Damage | None:
    """Return the entry in the file `path`; None when there is no such file."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        return Damage(path, "is a directory", path)
    try:
        return decode(text, path.stem)
    except StoreDamaged as damage:
        return Damage(path, damage.what, path)


def object_damage(layout: Layout, entry: Entry, *, hashed: bool = True) -> Damage | None:
    """Return the first thing wrong with the files of an entry."""
    folder = layout.object(entry.digest)
    difference = first_difference(folder, entry.files, hashed=hashed)
    return Damage(folder / difference.path, difference.problem, folder) if difference else None


def read_entries(layout: Layout) -> tuple[list[Entry], list[Damage]]:
    """Return all entries, newest first, and those that can't be read; files are not looked at."""
    entries: list[Entry] = []
    damages: list[Damage] = []
    for path in sorted(layout.entries.glob("*.json")):
        found = read_entry(path)
        if isinstance(found, Damage):
            damages.append(found)
        elif found is not None:
            entries.append(found)
    return sorted(entries, key=lambda entry: (-entry.created_s, entry.key.digest)), damages
