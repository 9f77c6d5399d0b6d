"""Read everything in a store and say what is not as it was stored."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vbpipe.errors import StoreError
from vbpipe.store.commit import committing, set_aside
from vbpipe.store.entry import Entry
from vbpipe.store.inspect import Damage, object_damage, read_entries, read_entry
from vbpipe.store.layout import HEX_DIGEST, Layout
from vbpipe.store.tree import contents, tree_digest

_Check = Callable[[], Damage | None]


@dataclass(frozen=True)
class VerifyReport:
    """What a verification found.

    `entries` and `objects` count what was read. `orphans` are intact objects that no entry names, as a crash or a
    newer result leaves them: harmless, and removed by a collection. `repaired`: what is damaged was set aside.
    """

    entries: int
    objects: int
    damaged: tuple[Damage, ...]
    orphans: tuple[Path, ...]
    repaired: bool

    @property
    def ok(self) -> bool:
        return not self.damaged


def verify(layout: Layout, repair: bool) -> VerifyReport:
    """Check every file under entries/ and objects/; raises OSError when they can't be read."""
    names = sorted(layout.entries.iterdir()) if layout.entries.is_dir() else []
    entries, _ = read_entries(layout)
    by_digest = {entry.digest: entry for entry in entries}
    objects = _object_paths(layout)
    checks: list[_Check] = [partial(_check_entry, layout, path) for path in names]
    checks += [partial(_check_object, layout, path, by_digest) for path in objects]
    suspects = [check for check in checks if check() is not None]
    damaged = _confirm(layout, suspects, repair) if suspects else ()
    owners = {damage.owner for damage in damaged}
    orphans = tuple(path for path in objects if path.name not in by_digest and path not in owners)
    return VerifyReport(len(names), len(objects), damaged, orphans, repair and bool(damaged))


def _object_paths(layout: Layout) -> list[Path]:
    """Return objects, and whatever else lies where only objects may."""
    if not layout.objects.is_dir():
        return []
    found: list[Path] = []
    for shard in sorted(layout.objects.iterdir()):
        is_shard = re.fullmatch(r"[0-9a-f]{2}", shard.name) and shard.is_dir() and not shard.is_symlink()
        found += sorted(shard.iterdir()) if is_shard else [shard]
    return found


def _check_entry(layout: Layout, path: Path) -> Damage | None:
    if path.suffix != ".json" or not HEX_DIGEST.fullmatch(path.stem):
        return _foreign(path)
    found = read_entry(path)
    if found is None or isinstance(found, Damage):
        return found
    folder = layout.object(found.digest)
    # A wrong object is reported once, by its own check; here only its absence makes the entry useless.
    return None if folder.is_dir() else Damage(folder, "is missing", path)


def _check_object(layout: Layout, path: Path, by_digest: Mapping[str, Entry]) -> Damage | None:
    if not HEX_DIGEST.fullmatch(path.name) or path != layout.object(path.name) or path.is_symlink():
        return _foreign(path)
    entry = by_digest.get(path.name)
    if entry is not None:
        damage = object_damage(layout, entry)
        return damage if os.path.lexists(path) else None
    try:
        same = tree_digest(contents(path)) == path.name
    except StoreError as error:
        return Damage(path, f"is not as it was stored: {error.what}", path)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return _foreign(path)
    return None if same else Damage(path, "has other files or bytes than were stored", path)


def _foreign(path: Path) -> Damage | None:
    return Damage(path, "is nothing that the store wrote", path) if os.path.lexists(path) else None


def _confirm(layout: Layout, suspects: Iterable[_Check], repair: bool) -> tuple[Damage, ...]:
    """Look again, while no other process changes anything: what was seen may have been on its way in or out."""
    if not repair and not os.access(layout.base, os.W_OK):
        return tuple(damage for check in suspects if (damage := check()))
    with committing(layout):
        damaged = tuple(damage for check in suspects if (damage := check()))
        for damage in damaged if repair else ():
            set_aside(layout, damage.owner)
    return damaged
