"""Where everything in a store lies."""

from __future__ import annotations

import re
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

FORMAT = "v1"
"""Part of every path: a store of another format is beside this one, never mixed with it."""

HEX_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Layout:
    """The paths of a store. Nothing here touches the disk."""

    root: Path

    @property
    def base(self) -> Path:
        return self.root / FORMAT

    @property
    def objects(self) -> Path:
        return self.base / "objects"

    @property
    def entries(self) -> Path:
        return self.base / "entries"

    @property
    def locks(self) -> Path:
        return self.base / "locks"

    @property
    def tmp(self) -> Path:
        """Workspaces, and garbage on its way out. Whatever no live process holds may be removed by anyone."""
        return self.base / "tmp"

    @property
    def failures(self) -> Path:
        return self.base / "failures"

    @property
    def damaged(self) -> Path:
        """What was set aside because its bytes are wrong; for the user to look at until the next collection."""
        return self.base / "damaged"

    @property
    def commit_lock(self) -> Path:
        """Held while entries and objects change: by a put, a set-aside, a repair and a collection."""
        return self.locks / "commit.lock"

    def object(self, digest: str) -> Path:
        return self.objects / digest[:2] / digest

    def entry(self, key_digest: str) -> Path:
        return self.entries / f"{key_digest}.json"

    def key_lock(self, key_digest: str) -> Path:
        return self.locks / f"key-{key_digest}.lock"

    def host_lock(self, part: str) -> Path:
        """Return a lock of this host: a store on a network disk has one for each host that measures."""
        host = re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())
        return self.locks / f"host-{host}-{part}.lock"

    def failure(self, key_digest: str) -> Path:
        return self.failures / key_digest

    def garbage(self) -> Path:
        """Return a new name under `tmp` for something that is to be removed."""
        return self.tmp / f"gone-{secrets.token_hex(8)}"

    def aside(self, path: Path) -> Path:
        """Return a new name under `damaged` for `path`."""
        return self.damaged / f"{path.name}.{secrets.token_hex(4)}"
