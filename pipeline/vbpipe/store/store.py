"""The store, as the rest of vbpipe uses it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vbpipe.core import Artifact, CacheKey, Meta
from vbpipe.errors import StoreError
from vbpipe.store.collect import GcReport, KeepRules, collect
from vbpipe.store.commit import commit, committing, note_identities, set_aside
from vbpipe.store.entry import Entry, decode, encode
from vbpipe.store.explain import Explanation, Provenance, explained, provenance
from vbpipe.store.faults import reported
from vbpipe.store.inspect import Damage, inspect, read_entries
from vbpipe.store.layout import Layout
from vbpipe.store.locks import GiveUp, OnWait, flocked
from vbpipe.store.tree import seal, tree_digest
from vbpipe.store.verify import VerifyReport, verify
from vbpipe.store.workspace import remove, sweep, workspace

Warn = Callable[[str], None]


@dataclass(frozen=True)
class Store:
    """Results of steps by cache key, their files by content. Several processes may use one store.

    Making a Store touches nothing; folders appear with the first write. A store that can't be written serves hits.
    Every method raises StoreError when the disk refuses what it needs.

    Args:
        root: the store's folder.
        warn: called with a sentence about damage that was found and treated as a miss.
    """

    root: Path
    warn: Warn = logging.getLogger(__name__).warning

    @property
    def layout(self) -> Layout:
        """Return where everything lies."""
        return Layout(self.root)

    def get(self, key: CacheKey, *identities: str) -> Artifact | None:
        """Return the artifact of a key, every byte of it verified; None is a miss.

        Damage is a miss too: what is damaged is set aside and `warn` is told.

        Args:
            key: what the step depends on.
            identities: the names of the step in this build; recorded with the entry where they are new there.
        """
        with reported("read the store", self.root):
            self._touch(key)
            inspection = inspect(self.layout, key.digest)
        entry = inspection.usable
        if inspection.damage is not None:
            entry = self._set_aside(key, inspection.damage)
        if entry is None:
            return None
        if not entry.identities.keys() >= set(identities):
            self._note(entry, identities)
        return self._artifact(entry)

    def peek(self, key: CacheKey) -> Entry | None:
        """Return the entry of a key if its files are there with the right sizes; their bytes are not read."""
        with reported("read the store", self.root):
            return inspect(self.layout, key.digest, hashed=False).usable

    def put(self, key: CacheKey, *identities: str, kind: str, source_dir: Path, meta: Meta, seconds: float) -> Artifact:
        """Keep what a step made, durably, and return it as a later `get` will.

        Args:
            key: what the step depends on.
            identities: the step's names in this build: "minilm/standard/cpu/quantize". At least one.
            kind: the artifact's kind.
            source_dir: its files, under a directory of `workspace()`. It belongs to the store from here on. Empty
                directories and the files' modes are not kept.
            meta: JSON facts about it.
            seconds: what the step took.

        Raises:
            StoreError: also when a file is a link or special, or the meta is not JSON. Nothing is kept then.
        """
        with reported("keep the result of a step", self.root), self.workspace() as scratch:
            files = seal(source_dir)
            now_s = time.time()
            drawn = Entry(key, dict.fromkeys(identities, now_s), kind, tree_digest(files), meta, files, now_s, seconds)
            entry = decode(encode(drawn), key.digest)  # as a hit will see it: tuples are lists
            entry = commit(self.layout, entry, source_dir, scratch)
            remove(self.layout.failure(key.digest))
        return self._artifact(entry)

    def workspace(self) -> AbstractContextManager[Path]:
        """Return a context that yields an empty directory for a step to write in.

        It is gone after the block, or after the next workspace is made if this process is killed.
        """
        return workspace(self.layout)

    def sweep(self) -> int:
        """Remove the workspaces of dead processes, and return how many there were."""
        with reported("clean the store", self.root):
            return sweep(self.layout)

    def locked(
        self, key: CacheKey, on_wait: OnWait | None = None, give_up: GiveUp | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which no other process or thread makes this step; `get` again inside it.

        Not reentrant. The lock ends with its process.
        """
        return self._lock(self.layout.key_lock(key.digest), True, on_wait, give_up)

    @contextmanager
    def host_lock(
        self, *, exclusive: bool, on_wait: OnWait | None = None, give_up: GiveUp | None = None
    ) -> Iterator[None]:
        """Share this host with other steps, or have it alone to measure, for the block.

        Whoever waits for the host alone is served before those who come to share it later. Not reentrant: a
        step that shares the host and asks again waits for itself.
        """
        with ExitStack() as held:
            with self._lock(self.layout.host_lock("turn"), True, on_wait, give_up):
                held.enter_context(self._lock(self.layout.host_lock("use"), exclusive, on_wait, give_up))
            yield

    def entries(self) -> tuple[Entry, ...]:
        """Return all entries, newest first; those that can't be read are told to `warn` and left out."""
        with reported("read the store", self.root):
            entries, damages = read_entries(self.layout)
        for damage in damages:
            self.warn(f"{damage}; run `vbpipe store verify --repair`.")
        return tuple(entries)

    def explain(
        self, key: CacheKey, identity: str, *, among: Iterable[Entry] | None = None, hashed: bool = True
    ) -> Explanation:
        """Return why a step is a hit or a miss; changes nothing.

        Args:
            key: what the step depends on now.
            identity: its name in this build.
            among: `entries()`, for a caller that explains many steps.
            hashed: False takes the bytes of the files on trust, as `peek` does.
        """
        with reported("read the store", self.root):
            inspection = inspect(self.layout, key.digest, hashed=hashed)
        return explained(inspection, key, identity, self.entries() if among is None else among)

    def why(self, query: str) -> tuple[Provenance, ...]:
        """Return what a name stands for, newest first, each with what changed since the entry before it.

        Args:
            query: an identity, or the first characters of a key's or an artifact's digest.

        Raises:
            StoreError: nothing has that name.
        """
        return provenance(query, self.entries())

    def verify(self, *, repair: bool = False) -> VerifyReport:
        """Read every byte of every entry and object, and return what is not as it was stored.

        Args:
            repair: set aside what is damaged, so that the next build makes it again.
        """
        with reported("verify the store", self.root):
            return verify(self.layout, repair)

    def gc(
        self,
        *,
        keep: Collection[str] = (),
        keep_days: float = 30.0,
        newest: int = 1,
        grace_s: float = 86400.0,
        dry_run: bool = False,
    ) -> GcReport:
        """Remove what no one needs, and return what that was.

        An entry stays if one of these holds: `keep` names it, it was used in the last `keep_days`, it is among the
        `newest` of one of its identities, an entry that stays was made from its artifact, it is locked, or it was
        used within the grace period. Objects that no entry names go once they are older than that.

        Args:
            keep: identities, and digests of keys and artifacts.
            keep_days: days since the last use.
            newest: entries per identity.
            grace_s: longer than the longest build: a running build may use what it got this long ago.
            dry_run: only say what would go.
        """
        with reported("collect garbage in the store", self.root):
            return collect(self.layout, KeepRules(frozenset(keep), keep_days, newest, grace_s), dry_run)

    def fail(self, key: CacheKey, log: Path, job: Mapping[str, object]) -> Path:
        """Keep the log and the job of a failed step for the user, and return their folder. Never a hit.

        The next success of the same key, or age, removes it.
        """
        with reported("keep the log of a failed step", self.root), self.workspace() as scratch:
            kept = scratch / "failure"
            kept.mkdir()
            (kept / "job.json").write_text(json.dumps(job, indent=2, sort_keys=True, default=str) + "\n")
            if log.exists():
                shutil.copyfile(log, kept / "log.txt")
            with committing(self.layout):
                target = self.layout.failure(key.digest)
                target.parent.mkdir(exist_ok=True)
                remove(target)
                kept.rename(target)
        return target

    def failure(self, key: CacheKey) -> Path | None:
        """Return the folder with `log.txt` and `job.json` if the step failed when it last ran."""
        folder = self.layout.failure(key.digest)
        return folder if folder.is_dir() else None

    def _artifact(self, entry: Entry) -> Artifact:
        return Artifact(entry.kind, entry.digest, self.layout.object(entry.digest), entry.meta)

    def _touch(self, key: CacheKey) -> None:
        # Before reading: a collection that decided to remove the entry looks once more and leaves it.
        with suppress(OSError):  # absent, or a store that can't be written
            os.utime(self.layout.entry(key.digest))

    def _set_aside(self, key: CacheKey, damage: Damage) -> Entry | None:
        try:
            with reported("set aside what is damaged", self.root), committing(self.layout):
                # Once more: another process may have replaced it while it was read.
                again = inspect(self.layout, key.digest)
                if again.damage is None:
                    return again.entry
                damage = again.damage
                set_aside(self.layout, damage.owner)
        except StoreError as error:
            self.warn(f"{damage}; treated as not there, but left in place: {error.what}")
            return None
        self.warn(f"{damage}; set aside in {self.layout.damaged}, and treated as not there.")
        return None

    def _note(self, entry: Entry, names: Collection[str]) -> None:
        # A name is for explanations only: a store that can't be written still serves the hit.
        with suppress(StoreError), reported("name an entry", self.root), self.workspace() as scratch:
            note_identities(self.layout, entry, names, time.time(), scratch)

    @contextmanager
    def _lock(
        self, path: Path, exclusive: bool, on_wait: OnWait | None, give_up: GiveUp | None = None
    ) -> Iterator[None]:
        with ExitStack() as held:
            with reported("lock a step", path):
                path.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(flocked(path, exclusive=exclusive, on_wait=on_wait, give_up=give_up))
            yield
