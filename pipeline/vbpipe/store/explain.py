"""Say why a step is a hit or a miss, in terms of the parts of its key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from vbpipe.core import CacheKey
from vbpipe.errors import StoreError
from vbpipe.store.entry import Entry
from vbpipe.store.inspect import Damage, Inspection
from vbpipe.store.layout import HEX_DIGEST

State = Literal["hit", "changed", "never built", "damaged"]


@dataclass(frozen=True)
class Change:
    """One part of a key that differs; None where a key has no such part."""

    part: str
    old: str | None
    new: str | None

    def __str__(self) -> str:
        if self.old is None:
            return f"{self.part} is new ({_short(self.new)})"
        if self.new is None:
            return f"{self.part} is gone (was {_short(self.old)})"
        return f"{self.part} was {_short(self.old)}, is {_short(self.new)}"


@dataclass(frozen=True)
class Explanation:
    """Why a step is a hit or a miss. `against` is the newest entry of the same identity, for "changed"."""

    state: State
    changes: tuple[Change, ...] = ()
    damage: Damage | None = None
    against: Entry | None = None

    def __str__(self) -> str:
        if self.state == "damaged":
            return f"damaged: {self.damage}"
        return "; ".join(str(change) for change in self.changes) if self.changes else self.state


@dataclass(frozen=True)
class Provenance:
    """An entry, the one before it under the same identity, and what differs between their keys."""

    entry: Entry
    previous: Entry | None
    changes: tuple[Change, ...]


def differences(old: CacheKey, new: CacheKey) -> tuple[Change, ...]:
    """Return the parts that differ, in alphabetical order."""
    parts = sorted(old.parts.keys() | new.parts.keys())
    changes = (Change(part, old.parts.get(part), new.parts.get(part)) for part in parts)
    return tuple(change for change in changes if change.old != change.new)


def explained(inspection: Inspection, key: CacheKey, identity: str, entries: Iterable[Entry]) -> Explanation:
    """Return why `key` is what the inspection found, against `entries` where it is a plain miss."""
    if inspection.damage is not None:
        return Explanation("damaged", damage=inspection.damage)
    if inspection.entry is not None:
        return Explanation("hit")
    newest = _history(entries, identity)
    if not newest:
        return Explanation("never built")
    return Explanation("changed", changes=differences(newest[0].key, key), against=newest[0])


def provenance(query: str, entries: Sequence[Entry]) -> tuple[Provenance, ...]:
    """Return the entries that a query names, newest first.

    Args:
        query: an identity, or the first characters of a key's or an artifact's digest.
        entries: all of them.

    Raises:
        StoreError: it names none.
    """
    named = _history(entries, query)
    found = named or [e for e in entries if query and (e.key.digest.startswith(query) or e.digest.startswith(query))]
    if not found:
        known = sorted({name for entry in entries for name in entry.identities})
        near = difflib.get_close_matches(query, known, n=3)
        hint = f"Did you mean {' or '.join(near)}?" if near else "`vbpipe store ls` lists what there is."
        raise StoreError("no step or digest of that name in the store.", where=query, hint=hint)
    return tuple(_with_previous(entry, query if named else entry.identity, entries) for entry in found)


def _with_previous(entry: Entry, identity: str, entries: Sequence[Entry]) -> Provenance:
    history = _history(entries, identity)
    older = history[history.index(entry) + 1 :]
    if not older:
        return Provenance(entry, None, ())
    return Provenance(entry, older[0], differences(older[0].key, entry.key))


def _history(entries: Iterable[Entry], identity: str) -> list[Entry]:
    reached = [entry for entry in entries if identity in entry.identities]
    return sorted(reached, key=lambda entry: (-entry.identities[identity], -entry.created_s))


def _short(value: str | None) -> str:
    return value[:12] if value and HEX_DIGEST.fullmatch(value) else str(value)
