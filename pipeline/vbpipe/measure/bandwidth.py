"""How fast this host's memory is, by copying and reading arrays that no cache holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vbpipe.measure import facts

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_REPETITIONS = 8
_DEFAULT_CACHE_BYTES = 64 * 2**20
_UNKNOWN_MEMORY_BYTES = 2**30
_ITEM_BYTES = 8
_WAIT_S = 120.0
_CPUS = Path("/sys/devices/system/cpu")


def bandwidth_gb_s(threads: int, array_bytes: int | None = None) -> float | None:
    """Return 10^9 bytes a second, read and written ones both counted: the best of several copies and reads.

    Each thread has its own part of two arrays. A copy counts its bytes twice, as STREAM does (McCalpin, 1995): once
    read, once written; what a processor reads only to overwrite is not counted. A read is the arrays' inner product.
    Call it with BLAS held to one thread.

    Args:
        array_bytes: size of each array over all threads; by default twice the last-level caches.

    Returns:
        None where memory has no room for arrays that the caches can't hold.
    """
    size = _array_bytes(cache_bytes(), _memory_bytes()) if array_bytes is None else array_bytes
    if size is None:
        return None
    items = max(1, size // threads // _ITEM_BYTES)
    together = threading.Barrier(threads, timeout=_WAIT_S)
    with ThreadPoolExecutor(threads) as pool:
        spans = list(pool.map(lambda _: _timed(items, together), range(threads)))
    steps = zip(*spans, strict=True)
    fastest_s: float = min(max(end for _, end in step) - min(begin for begin, _ in step) for step in steps)
    return 2 * items * _ITEM_BYTES * threads / fastest_s / 1e9  # a copy and a read both move two arrays


def cache_bytes() -> int:
    """Return the size of all last-level caches that this process's cores have; 64 MiB where the system tells none."""
    found: dict[tuple[int, str], int] = {}
    for core in facts.affinity():
        for folder in (_CPUS / f"cpu{core}" / "cache").glob("index*"):
            level, size = _text(folder / "level"), _text(folder / "size")
            if level.isdigit() and size.endswith("K") and size[:-1].isdigit():
                found[int(level), _text(folder / "shared_cpu_list")] = int(size[:-1]) * 1024
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last) or _DEFAULT_CACHE_BYTES


def _array_bytes(caches: int, memory: int) -> int | None:
    """Return twice the caches, which two arrays exceed four times; less, but not below the caches, in small memory."""
    size = min(2 * caches, memory // 4)
    return size if size >= caches else None


def _memory_bytes() -> int:
    """Return the memory that is free or can be freed, at most the cgroup's limit."""
    lines = (line.split() for line in _text(Path("/proc/meminfo")).splitlines())
    free = next((int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"), _UNKNOWN_MEMORY_BYTES)
    limit = _text(Path("/sys/fs/cgroup/memory.max")) or _text(Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    return min(free, int(limit)) if limit.isdigit() else free


def _timed(items: int, together: threading.Barrier) -> Sequence[tuple[float, float]]:
    """Return begin and end of every copy and read of this thread."""
    import numpy as np

    # Each thread fills its own part, so that its pages lie in the memory next to it.
    source, target = np.full(items, 1.0), np.full(items, 2.0)
    steps: tuple[Callable[[], object], ...] = (
        lambda: np.copyto(target, source),
        lambda: np.dot(target, source),
    )  # both let other threads run
    spans = []
    for _ in range(_REPETITIONS):
        for step in steps:
            together.wait()
            begin = time.perf_counter()
            step()
            spans.append((begin, time.perf_counter()))
    return spans


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
