"""What the processes that we start have in common: how they begin, how they end, and with whom."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "TBB_NUM_THREADS",
)
_PR_SET_PDEATHSIG = 1
_ALLOCATION_FAILED = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV})
"""What ends native code that did not get memory: an exception that nobody catches, or a null pointer."""
_NO_MEMORY = re.compile(
    r"MemoryError|bad[_ ]alloc|(can't|cannot|unable to|failed to) allocate|failed to map segment", re.IGNORECASE
)
"""How Python, numpy, C++, torch, ONNX Runtime, the kernel and the loader of libraries say that there is no more."""


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs `module`'s main() on arguments, by this interpreter.

    Not `-m`: that would let a file in the user's folder stand in for any library (PYTHONSAFEPATH needs Python 3.11).
    """
    start = (
        f"import sys; sys.path[:] = [p for p in sys.path if p]; from {module} import main; sys.exit(main(sys.argv[1:]))"
    )
    return [sys.executable, "-c", start, *arguments]


def environment(threads: int, **more: str) -> Mapping[str, str]:
    """Return this process's environment with equal thread counts, set before the interpreter that reads them starts."""
    fixed = {name: str(threads) for name in _THREAD_VARIABLES}
    return {**os.environ, **fixed, "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", **more}


def die_with(parent: int) -> None:
    """Have the kernel end this process with its parent, however the parent ends (Linux)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(137)  # the parent ended before the line above


def describe_exit(code: int, memory_limit_mib: int | None = None, said: str = "") -> str:
    """Return how a process ended, and whether memory may be why.

    Args:
        code: its exit code as `subprocess` gives it.
        memory_limit_mib: the address space that it was allowed; None for all there is.
        said: the end of what it printed.
    """
    if code >= 0:
        end = f"its process ended with exit code {code} and no result."
    else:
        end = f"its process was ended by {_signal_name(-code)}."
    memory = out_of_memory(said, memory_limit_mib)
    if not memory and -code in _ALLOCATION_FAILED and memory_limit_mib is not None:
        memory = f"It was allowed {memory_limit_mib} MiB of memory; an allocation beyond that can end like this."
    if not memory and -code == signal.SIGKILL:
        memory = "The machine may be out of memory."
    return f"{end} {memory}".rstrip()


def out_of_memory(said: str, memory_limit_mib: int | None) -> str:
    """Return the sentence that says so where `said` tells of memory that was not given, else ""."""
    if not _NO_MEMORY.search(said):
        return ""
    if memory_limit_mib is None:
        return "It ran out of memory."
    return f"It ran out of memory: it was allowed {memory_limit_mib} MiB."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
