"""What is known about one result, and its form on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vbpipe.core import CacheKey, Meta
from vbpipe.errors import StoreDamaged, StoreError
from vbpipe.store.layout import HEX_DIGEST
from vbpipe.store.tree import StoredFile, tree_digest


@dataclass(frozen=True)
class Entry:
    """A cache key and what the step gave for it.

    `identities` maps each name by which a build has reached this entry ("minilm/standard/cpu/quantize") to the unix
    time when it first did: steps shared by variants have one entry with several names. `created_s` is a unix time,
    `seconds` is what the step took.
    """

    key: CacheKey
    identities: Mapping[str, float]
    kind: str
    digest: str
    meta: Meta
    files: tuple[StoredFile, ...]
    created_s: float
    seconds: float

    @property
    def identity(self) -> str:
        """Return the name under which it was built first."""
        return min(self.identities, key=lambda name: (self.identities[name], name))

    @property
    def size(self) -> int:
        """Return the bytes of its files."""
        return sum(file.size for file in self.files)

    def reached_by(self, identities: Mapping[str, float]) -> Entry:
        """Return the entry with more names; a name that it has keeps its time."""
        return replace(self, identities={**identities, **self.identities})


def encode(entry: Entry) -> bytes:
    """Return the one form of the entry on disk: canonical JSON with a checksum over the rest.

    Raises:
        StoreError: the meta is not JSON.
    """
    body = {
        "created_s": entry.created_s,
        "digest": entry.digest,
        "files": [[file.path, file.size, file.sha256] for file in entry.files],
        "identities": dict(entry.identities),
        "key": dict(entry.key.parts),
        "kind": entry.kind,
        "meta": dict(entry.meta),
        "seconds": entry.seconds,
    }
    try:
        return _sealed(body)
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"what the step says about its result can't be kept: {error}.",
            where=entry.identity,
            hint="A step's meta holds strings, finite numbers, booleans, lists and mappings with string keys.",
        ) from error


def decode(text: bytes, key_digest: str) -> Entry:
    """Return the entry whose form is exactly `text`.

    Raises:
        StoreDamaged: a byte is not as `encode` wrote it, or it belongs to another key.
    """
    try:
        body = json.loads(text)["entry"]
        if _sealed(body) != text:
            raise StoreDamaged("has other bytes than were stored")
        entry = _entry(body)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise StoreDamaged("is not an entry as the store writes it") from error
    if entry.key.digest != key_digest or entry.digest != tree_digest(entry.files) or not entry.identities:
        raise StoreDamaged("is the entry of something else")
    return entry


def _sealed(body: Mapping[str, object]) -> bytes:
    checksum = hashlib.sha256(_canonical(body)).hexdigest()
    return _canonical({"checksum": checksum, "entry": body}) + b"\n"


def _canonical(value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def _entry(body: dict[str, Any]) -> Entry:
    if not HEX_DIGEST.fullmatch(body["digest"]):
        raise ValueError("not a digest")
    return Entry(
        key=CacheKey(body["key"]),
        identities=body["identities"],
        kind=body["kind"],
        digest=body["digest"],
        meta=body["meta"],
        files=tuple(StoredFile(path, size, sha256) for path, size, sha256 in body["files"]),
        created_s=body["created_s"],
        seconds=body["seconds"],
    )
