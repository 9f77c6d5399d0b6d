"""Remove what no one needs any more, and nothing that anyone may still be using."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vbpipe.store.commit import committing
from vbpipe.store.entry import Entry
from vbpipe.store.inspect import read_entries
from vbpipe.store.layout import Layout
from vbpipe.store.locks import flocked_now, is_held
from vbpipe.store.workspace import remove, sweep

_DAY_S = 86400.0


@dataclass(frozen=True)
class KeepRules:
    """What stays. See `Store.gc`."""

    keep: frozenset[str]
    keep_days: float
    newest: int
    grace_s: float


@dataclass(frozen=True)
class GcReport:
    """What a collection removed, or would remove.

    `objects` are digests, `workspaces` counts those of dead processes, `freed` is the bytes of the objects, `kept`
    counts the entries that stay.
    """

    entries: tuple[Entry, ...]
    objects: tuple[str, ...]
    workspaces: int
    freed: int
    kept: int
    dry_run: bool


@dataclass(frozen=True)
class _Used:
    entry: Entry
    used_s: float


def collect(layout: Layout, rules: KeepRules, dry_run: bool) -> GcReport:
    """Apply the rules; raises OSError when the store can't be read or written."""
    if dry_run:
        found = _entries(layout)
        doomed = _doomed(layout, rules, found)
        objects = _unreferenced(layout, rules, _without(found, doomed))
        return _report(found, doomed, objects, sum(map(_bytes, objects)), 0, dry_run)
    workspaces = sweep(layout)  # first: on a full disk it makes the room that the rest needs
    layout.tmp.mkdir(parents=True, exist_ok=True)
    with committing(layout):
        found = _entries(layout)
        doomed = [used for used in _doomed(layout, rules, found) if _drop(layout, used)]
        objects = _unreferenced(layout, rules, _without(found, doomed))
        gone = [path.rename(layout.garbage()) for path in objects]
    freed = sum(map(_bytes, gone))
    for path in gone:
        remove(path)
    _tidy(layout, rules)
    return _report(found, doomed, objects, freed, workspaces, dry_run)


def _entries(layout: Layout) -> list[_Used]:
    found: list[_Used] = []
    for entry in read_entries(layout)[0]:
        with suppress(FileNotFoundError):
            found.append(_Used(entry, layout.entry(entry.key.digest).stat().st_mtime))
    return found


def _doomed(layout: Layout, rules: KeepRules, found: Sequence[_Used]) -> list[_Used]:
    now_s = time.time()
    newest = _newest(rules.newest, [used.entry for used in found])
    kept = [
        used.entry
        for used in found
        if now_s - used.used_s < rules.grace_s
        or (_wanted(rules, used, newest, now_s) and layout.object(used.entry.digest).is_dir())
        or is_held(layout.key_lock(used.entry.key.digest))
    ]
    keys = _with_sources(kept, [used.entry for used in found])
    return [used for used in found if used.entry.key.digest not in keys]


def _wanted(rules: KeepRules, used: _Used, newest: Collection[str], now_s: float) -> bool:
    entry = used.entry
    return (
        now_s - used.used_s < rules.keep_days * _DAY_S
        or entry.key.digest in newest
        or not rules.keep.isdisjoint({entry.key.digest, entry.digest, *entry.identities})
    )


def _newest(count: int, entries: Sequence[Entry]) -> frozenset[str]:
    """Return the key digests of the newest entries of each identity."""
    reached: dict[str, list[tuple[float, float, str]]] = {}
    for entry in entries:
        for identity, reached_s in entry.identities.items():
            reached.setdefault(identity, []).append((reached_s, entry.created_s, entry.key.digest))
    return frozenset(key for history in reached.values() for _, _, key in sorted(history, reverse=True)[:count])


def _with_sources(kept: Sequence[Entry], entries: Sequence[Entry]) -> frozenset[str]:
    """Return the key digests of `kept` and of all that their artifacts were made from.

    Without its source an entry is of no use: its key can't be formed until the source has been made again.
    """
    by_digest: dict[str, list[Entry]] = {}
    for entry in entries:
        by_digest.setdefault(entry.digest, []).append(entry)
    keys: set[str] = set()
    waiting = list(kept)
    while waiting:
        entry = waiting.pop()
        if entry.key.digest in keys:
            continue
        keys.add(entry.key.digest)
        read = (value for part, value in entry.key.parts.items() if part.startswith("input."))
        waiting.extend(source for digest in read for source in by_digest.get(digest, ()))
    return frozenset(keys)


def _without(found: Sequence[_Used], doomed: Sequence[_Used]) -> frozenset[str]:
    """Return the artifact digests that remain named."""
    gone = {used.entry.key.digest for used in doomed}
    return frozenset(used.entry.digest for used in found if used.entry.key.digest not in gone)


def _unreferenced(layout: Layout, rules: KeepRules, named: Collection[str]) -> list[Path]:
    now_s = time.time()
    paths = sorted(layout.objects.glob("??/*"))
    return [path for path in paths if path.name not in named and now_s - path.lstat().st_mtime >= rules.grace_s]


def _drop(layout: Layout, used: _Used) -> bool:
    """Remove an entry, unless a reader touched it since the decision: it may be using the files."""
    path, gone = layout.entry(used.entry.key.digest), layout.garbage()
    try:
        path.rename(gone)
        if gone.stat().st_mtime != used.used_s:
            gone.rename(path)
            return False
        gone.unlink()
    except FileNotFoundError:
        return False
    return True


def _tidy(layout: Layout, rules: KeepRules) -> None:
    for path in _older(layout.damaged.glob("*"), rules.grace_s):
        remove(path)
    for path in _older(layout.failures.glob("*"), max(rules.keep_days * _DAY_S, rules.grace_s)):
        remove(path)
    for path in _older(layout.locks.glob("key-*.lock"), rules.grace_s):
        with flocked_now(path) as mine:
            if mine:
                path.unlink(missing_ok=True)


def _older(paths: Iterable[Path], age_s: float) -> list[Path]:
    now_s = time.time()
    # The change time: moving a thing here counts, the age of its bytes does not.
    return [path for path in paths if now_s - path.lstat().st_ctime >= age_s]


def _bytes(path: Path) -> int:
    return sum((Path(folder) / name).lstat().st_size for folder, _, names in os.walk(path) for name in names)


def _report(
    found: Sequence[_Used], doomed: Sequence[_Used], objects: Sequence[Path], freed: int, workspaces: int, dry_run: bool
) -> GcReport:
    return GcReport(
        entries=tuple(used.entry for used in doomed),
        objects=tuple(path.name for path in objects),
        workspaces=workspaces,
        freed=freed,
        kept=len(found) - len(doomed),
        dry_run=dry_run,
    )
