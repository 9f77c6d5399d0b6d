"""Flip one byte in each file of a store, one file at a time, and count how often `verify` and a build's read notice.

python benchmarks/damage.py STORE
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from vbpipe.store import Store


def main(folder: Path) -> int:
    """Try every file at its first, a random and its last byte; put it back; return 1 when one went unnoticed."""
    store = Store(folder, warn=lambda _text: None)
    entries = store.entries()
    places = random.Random(0)
    files = sorted(p for part in ("objects", "entries") for p in (folder / "v1" / part).rglob("*") if p.is_file())
    missed = tried = 0
    for path in files:
        good = path.read_bytes()
        mode = path.stat().st_mode
        path.chmod(0o644)
        for place in sorted({0, places.randrange(len(good)), len(good) - 1}):
            path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
            tried += 1
            by_verify = bool(store.verify().damaged)
            by_read = any(
                store.explain(e.key, e.identity, among=entries).state == "damaged" for e in _near(path, entries)
            )
            if not (by_verify and by_read):
                missed += 1
                print(f"unnoticed: {path} at {place}")
            path.write_bytes(good)
        path.chmod(mode)
    print(f"{len(files)} files, {tried} flips, {missed} unnoticed; whole again: {not store.verify().damaged}")
    return int(missed > 0)


def _near(path: Path, entries: tuple) -> list:  # type: ignore[type-arg]  # entries are read, never made here
    """Return the entries that a flip in `path` concerns."""
    return [e for e in entries if e.key.digest == path.stem or e.digest in path.parts]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
