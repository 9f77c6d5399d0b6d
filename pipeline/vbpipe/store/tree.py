"""Read, seal and compare directories by content."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vbpipe.errors import StoreError

_CHUNK_BYTES = 1 << 20
_READ_FAULTS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EIO})


@dataclass(frozen=True)
class StoredFile:
    """One file of an artifact. `path` is relative, with forward slashes; `size` in bytes; `sha256` in hex."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Difference:
    """The first thing in a directory that is not as it was stored."""

    path: str
    problem: str


def tree_digest(files: Iterable[StoredFile]) -> str:
    """Return the sha256 (hex) that names a directory with these files, in any order."""
    rows = sorted([file.path, file.size, file.sha256] for file in files)
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def contents(root: Path) -> tuple[StoredFile, ...]:
    """Return the files under `root`, sorted by path.

    Raises:
        StoreError: something there is neither a regular file nor a directory, or its name is not UTF-8.
        OSError: it can't be read.
    """
    names = sorted(_files(root, strict=True))
    return tuple(StoredFile(name, *_read(root / name)) for name in names)


def seal(root: Path) -> tuple[StoredFile, ...]:
    """Make the files under `root` read-only and durable, remove its empty directories, and return the files.

    Raises:
        StoreError: a symbolic link, a special file, a file with a second hard link or a name that is not UTF-8.
        OSError: the disk refuses.
    """
    found = _files(root, strict=True)
    for name, status in found.items():
        if status.st_nlink > 1:
            raise StoreError(
                f"{name!r} is a hard link: its bytes could be changed from outside the store.",
                where=str(root),
                hint="A step must copy files into its output.",
            )
        (root / name).chmod(0o444)
    for folder, _, _ in os.walk(root, topdown=False):
        if not any(Path(folder).iterdir()) and Path(folder) != root:
            Path(folder).rmdir()
        else:
            Path(folder).chmod(0o755)
            fsync(Path(folder))
    return tuple(StoredFile(name, *_read(root / name, durable=True)) for name in sorted(found))


def first_difference(root: Path, files: Iterable[StoredFile], *, hashed: bool = True) -> Difference | None:
    """Return the first way in which `root` does not hold exactly `files`; None when it does.

    Args:
        root: a directory; its absence is a difference.
        files: what it must hold.
        hashed: False compares names and sizes only.

    Raises:
        OSError: a reason that is not the stored bytes' fault, such as permissions.
    """
    try:
        if not stat.S_ISDIR(root.lstat().st_mode):
            return Difference("", "is not a directory")
        found = _files(root, strict=False)
    except OSError as error:
        return _fault("", error)
    expected = {file.path: file for file in files}
    for name in sorted(found.keys() | expected.keys()):
        difference = _compare(root, name, found.get(name), expected.get(name), hashed)
        if difference is not None:
            return difference
    return None


def fsync(path: Path) -> None:
    """Return when the file or directory is on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files(root: Path, *, strict: bool) -> dict[str, os.stat_result]:
    """Return relative path to status. When not strict, also links, special files and empty directories."""
    found: dict[str, os.stat_result] = {}
    folders = [(root, "")]
    while folders:
        folder, prefix = folders.pop()
        with os.scandir(folder) as children:
            listing = list(children)
        if prefix and not listing and not strict:
            found[prefix] = folder.lstat()
        for child in listing:
            name = prefix + child.name
            status = child.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                folders.append((folder / child.name, f"{name}/"))
                continue
            if strict:
                _refuse_odd(root, name, status)
            found[name] = status
    return found


def _refuse_odd(root: Path, name: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "a special file"
        raise StoreError(
            f"{name!r} is {kind}; an artifact holds regular files only.",
            where=str(root),
            hint="A step must copy files into its output.",
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise StoreError(f"the name {name!r} is not UTF-8.", where=str(root), hint="Rename the file.") from error


def _compare(
    root: Path, name: str, found: os.stat_result | None, expected: StoredFile | None, hashed: bool
) -> Difference | None:
    if found is None:
        return Difference(name, "is missing")
    if expected is None:
        return Difference(name, "was not there when this was stored")
    if not stat.S_ISREG(found.st_mode):
        return Difference(name, "is not a regular file any more")
    if found.st_size != expected.size:
        return Difference(name, f"has {found.st_size} bytes instead of {expected.size}")
    if not hashed:
        return None
    try:
        same = _read(root / name) == (expected.size, expected.sha256)
    except OSError as error:
        return _fault(name, error)
    return None if same else Difference(name, "has other bytes than were stored")


def _fault(name: str, error: OSError) -> Difference:
    if error.errno not in _READ_FAULTS:
        raise error
    return Difference(name, "can't be read from the disk" if error.errno == errno.EIO else "is missing")


def _read(path: Path, *, durable: bool = False) -> tuple[int, str]:
    """Return size and sha256 of a regular file, never following a link."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    size = 0
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(handle, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
        if durable:
            os.fsync(handle)
    return size, digest.hexdigest()
