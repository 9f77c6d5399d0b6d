"""ONNX Runtime that is in order everywhere but in the process that measures it: there it does what its note says."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from vbpipe.core import Artifact, Backend, Dialect, Meta, Run, Spec
from vbpipe_fake.misdeed import NOTE, Misdeed
from vbpipe_stages.backends.onnxruntime import OnnxRuntime

Array = np.ndarray[Any, Any]
Outputs = dict[str, Array]

_SOON = 3
"""Right answers before a misdeed that is to come soon."""
_CHUNK = 64 * 2**20
_CHUNKS = 1024
"""64 GiB, never touched: where no limit stops a leak, it ends here and the row is measured."""


class Misbehaving(Spec):
    """Keeps the graph as it is; answers like ONNX Runtime."""

    name: ClassVar[str] = "misbehaving"
    source: ClassVar[str] = "misdeed"
    runs: ClassVar[frozenset[str]] = frozenset({"engine"})
    dialect: ClassVar[Dialect] = "onnxruntime"

    def unavailable(self) -> str | None:
        return OnnxRuntime().unavailable()

    def fingerprint(self) -> Mapping[str, str]:
        return OnnxRuntime().fingerprint()

    def build(self, source: Artifact, out: Path, threads: int) -> Meta:
        shutil.copytree(source.path, out, dirs_exist_ok=True, copy_function=shutil.copyfile)
        return {}

    @contextmanager
    def open(self, kind: str, path: Path, threads: int, root: Path | None = None) -> Iterator[Run]:
        with OnnxRuntime().open("onnx", path, threads, root) as run:
            measured = "vbpipe.measure.worker" in sys.modules
            note = Misdeed.model_validate_json((path / NOTE).read_text(encoding="utf-8"))
            yield _spoilt(run, note) if measured and note.does != "nothing" else run


def _spoilt(run: Run, note: Misdeed) -> Run:
    """Return a run that turns bad when its note says so."""
    misdeed, cores, calls = _MISDEEDS[note.does], len(os.sched_getaffinity(0)), 0

    def spoilt(arrays: Mapping[str, Array]) -> Outputs:
        nonlocal calls
        calls += 1
        # Workers are moved to fewer cores once they are timed; where there is but one, soon has to do.
        timed = len(os.sched_getaffinity(0)) < cores or cores == 1
        now = note.when == "at once" or (calls > _SOON and (note.when == "soon" or timed))
        return misdeed(run, arrays) if now else run(arrays)

    return spoilt


def _segfault(run: Run, arrays: Mapping[str, Array]) -> Outputs:
    ctypes.memset(0, 1, 1)
    return run(arrays)


def _exit(run: Run, arrays: Mapping[str, Array]) -> Outputs:
    os._exit(0)


def _killed(run: Run, arrays: Mapping[str, Array]) -> Outputs:
    os.kill(os.getpid(), signal.SIGKILL)
    return run(arrays)


def _hang(run: Run, arrays: Mapping[str, Array]) -> Outputs:
    time.sleep(3600)  # it is killed for it after seconds, or ends with its parent
    return run(arrays)


def _print(run: Run, arrays: Mapping[str, Array]) -> Outputs:
    os.write(1, b'\x00\xff\xfe garbage {"said": "timed", "ns": [1], "cpu_ns": 1}\n{"said": "raised", "message": "x"}\n')
    return run(arrays)


def _garbage(run: Run, arrays: Mapping[str, Array]) -> Outputs:
    os.write(_message_pipe(), b"\x00\xff\xfe garbage\n")
    return run(arrays)


def _forge(run: Run, arrays: Mapping[str, Array]) -> Outputs:
    os.write(_message_pipe(), b'{"said": "pinned"}\n')
    return run(arrays)


def _forge_empty(run: Run, arrays: Mapping[str, Array]) -> Outputs:
    """Answer in the place of the worker, with no times at all."""
    os.write(_message_pipe(), b'{"said": "warmed", "ns": [], "stable": null}\n')
    return run(arrays)


def _chatter(run: Run, arrays: Mapping[str, Array]) -> Outputs:
    """Say for ever that it is still at it."""
    while True:
        os.write(_message_pipe(), b'{"said": "progress"}\n')


def _flood(run: Run, arrays: Mapping[str, Array]) -> Outputs:
    while True:
        os.write(_message_pipe(), b"\xff" * 65536)


def _leak(run: Run, arrays: Mapping[str, Array]) -> Outputs:
    held = [np.empty(_CHUNK, np.uint8) for _ in range(_CHUNKS)]
    return run(arrays) if held else {}


def _native_leak(run: Run, arrays: Mapping[str, Array]) -> Outputs:
    """Write to whatever malloc gives, as native code does that does not look: at the limit that is a null pointer."""
    malloc = ctypes.CDLL(None).malloc
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    for _ in range(_CHUNKS):
        ctypes.memset(malloc(_CHUNK) or 0, 1, 1)
    return run(arrays)


def _nan(run: Run, arrays: Mapping[str, Array]) -> Outputs:
    return {name: np.full_like(array, np.nan) for name, array in run(arrays).items()}


def _shape(run: Run, arrays: Mapping[str, Array]) -> Outputs:
    return {name: array[:1] for name, array in run(arrays).items()}


_ZEROS: Outputs = {}


def _zeros(run: Run, arrays: Mapping[str, Array]) -> Outputs:
    """Answer from a cache, many times faster than the engine, and wrongly."""
    if not _ZEROS:
        _ZEROS.update({name: np.zeros_like(array) for name, array in run(arrays).items()})
    return _ZEROS


def _message_pipe() -> int:
    return int(sys.argv[2])


_MISDEEDS: Mapping[str, Callable[[Run, Mapping[str, Array]], Outputs]] = {
    "segfault": _segfault,
    "exit": _exit,
    "killed": _killed,
    "hang": _hang,
    "print": _print,
    "garbage": _garbage,
    "forge": _forge,
    "forge_empty": _forge_empty,
    "chatter": _chatter,
    "flood": _flood,
    "leak": _leak,
    "native_leak": _native_leak,
    "nan": _nan,
    "shape": _shape,
    "zeros": _zeros,
}

PLUGIN: type[Backend] = Misbehaving
