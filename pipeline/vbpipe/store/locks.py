"""File locks that end with their process, whatever ends it."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vbpipe.errors import Interrupted


@dataclass(frozen=True)
class Holder:
    """Who holds a lock. `pid` is 0 when unknown, as for a lock that several processes share."""

    pid: int
    host: str


OnWait = Callable[[Holder], None]
"""Called once, before waiting, with the process that is waited for."""


GiveUp = Callable[[], bool]
"""Asked now and then while waiting; True ends the wait."""

_POLL_S = 0.05


@contextmanager
def flocked(
    path: Path, *, exclusive: bool = True, on_wait: OnWait | None = None, give_up: GiveUp | None = None
) -> Iterator[None]:
    """Hold the lock `path` for the block, waiting for it.

    Threads exclude each other as processes do; it is not reentrant. The kernel drops the lock when the process dies,
    so none goes stale; a child started by fork alone keeps it, one started by exec does not.

    Raises:
        OSError: the lock file can't be opened.
        Interrupted: `give_up` said so while it was waiting.
    """
    lock = _acquire(path, exclusive, on_wait, give_up)
    try:
        yield
    finally:
        _release(lock, exclusive)


@contextmanager
def flocked_now(path: Path) -> Iterator[bool]:
    """Hold the lock `path` exclusively if it is free; yield whether it is held by us."""
    lock = _open(path)
    try:
        yield _try(lock, fcntl.LOCK_EX) and _still_named(lock, path)
    finally:
        os.close(lock)


def is_held(path: Path) -> bool:
    """Return whether a live process holds the lock `path`; makes no file."""
    if not path.exists():
        return False
    with flocked_now(path) as mine:
        return not mine


def _acquire(path: Path, exclusive: bool, on_wait: OnWait | None, give_up: GiveUp | None) -> int:
    how = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    told = on_wait is None
    while True:
        lock = _open(path)
        try:
            if not _try(lock, how):
                if on_wait is not None and not told:
                    told = True
                    on_wait(_holder(lock))
                _wait(lock, how, give_up)
        except BaseException:  # also Ctrl-C while waiting: the descriptor must not outlive the wait
            os.close(lock)
            raise
        if _still_named(lock, path):
            break
        os.close(lock)
    if exclusive:
        _sign(lock)
    return lock


def _wait(lock: int, how: int, give_up: GiveUp | None) -> None:
    if give_up is None:
        fcntl.flock(lock, how)
        return
    while not _try(lock, how):
        if give_up():
            raise Interrupted("stopped while it was waiting for another process.")
        time.sleep(_POLL_S)


def _release(lock: int, exclusive: bool) -> None:
    if exclusive:
        with suppress(OSError):
            os.ftruncate(lock, 0)
    os.close(lock)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _try(lock: int, how: int) -> bool:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _still_named(lock: int, path: Path) -> bool:
    """Return whether `path` is still the locked file: it may have been removed between open and lock."""
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False


def _sign(lock: int) -> None:
    with suppress(OSError):  # a full disk must not keep a collection from taking the lock
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()} {socket.gethostname()}".encode(), 0)


def _holder(lock: int) -> Holder:
    for _ in range(20):  # between taking a lock and signing it lies a moment
        pid, _, host = os.pread(lock, 300, 0).decode(errors="replace").partition(" ")
        if pid.isdigit():
            return Holder(int(pid), host)
        time.sleep(0.002)
    return Holder(0, "")
