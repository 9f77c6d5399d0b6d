"""`vbpipe store`: look into the cache, check it, clean it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from vbpipe.cli.terminal import print_json, print_table, stderr, stdout, styled
from vbpipe.report.table import Cell
from vbpipe.store import Entry, Store


def list_entries(root: Path, *, as_json: bool) -> None:
    """Print every entry: step, kind, size, age, digests."""
    entries = _store(root).entries()
    if as_json:
        print_json([_as_json(entry) for entry in entries])
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("step", "kind", "MB", "took", "made", "key", "digest"):
        table.add_column(column)
    for entry in entries:
        more = f" +{len(entry.identities) - 1}" if len(entry.identities) > 1 else ""
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.created_s))
        texts = (entry.identity + more, entry.kind, f"{entry.size / 1e6:.1f}", f"{entry.seconds:.1f} s", made)
        digests = (entry.key.digest[:12], entry.digest[:12])
        table.add_row(*(styled(Cell(text)) for text in (*texts, *digests)))
    print_table(stdout(), table)


def explain_entry(root: Path, name: str, *, as_json: bool) -> None:
    """Print what the newest result of `name` was made from, and the parts that changed since the one before."""
    found = _store(root).why(name)
    if as_json:
        print_json([
            {**_as_json(p.entry), "parts": dict(p.entry.key.parts), "changes": [asdict(c) for c in p.changes]}
            for p in found
        ])  # fmt: skip
        return
    console = stdout()
    newest = found[0]
    console.print(f"{newest.entry.identity}: {newest.entry.kind} {newest.entry.digest[:12]}", markup=False)
    if newest.previous is None:
        console.print("nothing was made under this name before it.")
    for change in newest.changes:
        console.print(styled(Cell(f"changed: {change}", "doubtful")), soft_wrap=True)
    if newest.previous is not None:
        console.print(f"{len(newest.entry.key.parts)} parts in all; --json prints them")
        return
    for part, value in sorted(newest.entry.key.parts.items()):
        console.print(styled(Cell(f"  {part} = {value}", "faint")), soft_wrap=True)


def verify_store(root: Path, *, repair: bool, as_json: bool) -> int:
    """Read everything and print what is damaged; return 3 if anything is and stays so, else 0."""
    report = _store(root).verify(repair=repair)
    if repair and report.damaged:
        _store(root).verify(repair=True)  # entries whose objects were set aside just now
    if as_json:
        print_json({"entries": report.entries, "objects": report.objects, "damages": [str(d) for d in report.damaged]})
    else:
        console = stdout()
        for damage in report.damaged:
            word = "set aside" if repair else "damaged"
            console.print(styled(Cell(f"{word}: {damage}", "bad")), soft_wrap=True)
        console.print(f"{report.entries} entries, {report.objects} objects, {len(report.damaged)} damaged")
    return 3 if report.damaged and not repair else 0


@dataclass(frozen=True)
class GcRequest:
    """What to keep; see `Store.gc`."""

    keep: tuple[str, ...]
    keep_days: float
    newest: int
    grace_hours: float
    dry_run: bool


def collect_garbage(root: Path, request: GcRequest, *, as_json: bool) -> None:
    """Remove what nothing needs, and print how much that was.

    Raises:
        StoreError: `keep` names nothing that is there.
    """
    store = _store(root)
    for name in request.keep:
        store.why(name)
    report = store.gc(
        keep=request.keep,
        keep_days=request.keep_days,
        newest=request.newest,
        grace_s=request.grace_hours * 3600,
        dry_run=request.dry_run,
    )
    if as_json:
        print_json({"entries": [_as_json(e) for e in report.entries], "objects": report.objects, "freed": report.freed})
        return
    word = "would remove" if request.dry_run else "removed"
    count, freed = len(report.entries), report.freed / 1e6
    console = stdout()
    console.print(f"{word} {count} entries and {len(report.objects)} objects, {freed:.1f} MB; {report.kept} stay")
    if not count:
        console.print("each was used lately, or is the newest of its step: see --keep-days, --newest, --grace-hours")


def _store(root: Path) -> Store:
    console = stderr()
    return Store(root.absolute(), warn=lambda text: console.print(styled(Cell(f"warning: {text}", "doubtful"))))


def _as_json(entry: Entry) -> dict[str, object]:
    return {
        "identities": sorted(entry.identities),
        "kind": entry.kind,
        "key": entry.key.digest,
        "digest": entry.digest,
        "size": entry.size,
        "seconds": entry.seconds,
        "created_s": entry.created_s,
    }
