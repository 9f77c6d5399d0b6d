"""What the processes that we start have in common: how they begin, how they end, and with whom."""

from __future__ import annotations

import os
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


def describe_exit(code: int) -> str:
    """Return how a process ended, from its exit code as `subprocess` gives it."""
    if code >= 0:
        return f"its process ended with exit code {code} and no result."
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    guess = " The machine may be out of memory." if name == "SIGKILL" else ""
    return f"its process was ended by {name}.{guess}"
