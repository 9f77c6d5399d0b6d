"""The most that this host can do: memory bandwidth and rates of arithmetic, measured once and kept for reports."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from vbpipe import plugins
from vbpipe.core import Measurable
from vbpipe.errors import EngineError, UsageError
from vbpipe.measure import facts
from vbpipe.measure.bandwidth import bandwidth_gb_s
from vbpipe.processes import describe_exit, die_with, environment, python_command
from vbpipe.runner import Runner, configured

COMMAND = "vbpipe doctor --measure"

_TIMEOUT_S = 300.0

_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Shares:
    """What a call reached of each ceiling, 1.0 being all of it. None: the ceiling, or what to compare, isn't known."""

    fp32: float | None
    int8: float | None
    bandwidth: float | None


@dataclass(frozen=True)
class Ceilings:
    """The best that was measured on this host; other work on it at that time makes them too low.

    Args:
        threads: how many threads reached them.
        bandwidth_gb_s: 10^9 bytes a second, read and written ones both counted; None where memory was too small.
        rates: kind of arithmetic to 10^9 operations a second, a multiply-add as two; see `Measurable`.
        taken: when, in ISO 8601, UTC.
    """

    threads: Annotated[int, Field(ge=1)]
    bandwidth_gb_s: _Rate | None
    rates: Mapping[str, _Rate]
    taken: str

    @property
    def fp32(self) -> float | None:
        """Return the rate of 32-bit floating point in GFLOP/s."""
        return self.rates.get("fp32")

    @property
    def int8(self) -> float | None:
        """Return the best rate of 8-bit integers in Gop/s, whatever their signs."""
        return max((rate for name, rate in self.rates.items() if name.startswith("int8")), default=None)

    def shares(self, operations: float, moved_bytes: float | None, call_ms: float) -> Shares:
        """Return the shares of a call that takes so long; a count of 0 operations or None bytes gives no share."""

        def share(amount: float | None, ceiling: float | None) -> float | None:
            return amount / call_ms / 1e6 / ceiling if amount and ceiling and call_ms else None

        return Shares(
            share(operations, self.fp32), share(operations, self.int8), share(moved_bytes, self.bandwidth_gb_s)
        )

    def describe(self) -> str:
        """Return them as a phrase: "memory 12.0 GB/s, fp32 168 GFLOP/s, int8_u8s8 650 Gop/s"."""
        memory = "memory not measured" if self.bandwidth_gb_s is None else f"memory {self.bandwidth_gb_s:.1f} GB/s"
        return ", ".join((memory, *(f"{name} {rate:.0f} {unit(name)}" for name, rate in self.rates.items())))


@dataclass(frozen=True)
class Known:
    """What the cache holds for this host. `problem` says why a cache that is there can't be used; else it is empty."""

    found: tuple[Ceilings, ...]
    problem: str = ""

    def of(self, threads: int) -> Ceilings | None:
        """Return those of so many threads."""
        return next((one for one in self.found if one.threads == threads), None)


def unit(rate: str) -> str:
    """Return the unit of a rate, from its name."""
    return "Gop/s" if rate.startswith("int") else "GFLOP/s"


def measurable() -> tuple[str, ...]:
    """Return the backends that can be measured here, by name."""
    found = ((name, configured(Runner(backend=name))) for name in sorted(plugins.names("backends")))
    return tuple(name for name, backend in found if isinstance(backend, Measurable) and not backend.unavailable())


def measure_ceilings(backend: str, threads: int, array_bytes: int | None = None) -> Ceilings:
    """Measure a backend's rates and the memory's bandwidth, each in a fresh process; takes about ten seconds.

    Args:
        backend: one that is `Measurable`; its options are its defaults.
        array_bytes: size of each of the two arrays that are copied and read; by default from the caches' size.

    Raises:
        EngineError: one of the processes failed.
    """
    memory = _child("bandwidth", threads, "default" if array_bytes is None else str(array_bytes))
    rates = _child("rates", threads, backend)
    taken = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Ceilings(threads, memory["gb_s"], rates, taken)


def find(runner: Runner) -> tuple[Ceilings | None, str]:
    """Return the ceilings of what a target runs on, or the sentence that says why there are none."""
    backend, threads = configured(runner), runner.threads
    if not isinstance(backend, Measurable):
        return None, f"backend {runner.backend!r} can't measure this host's ceilings."
    if backend != configured(Runner(backend=runner.backend)):
        return None, f"ceilings are measured with {runner.backend}'s default options, and this target has others."
    known = load(host_key(runner.backend))
    ceilings = known.of(threads)
    if ceilings is not None:
        return ceilings, ""
    usual = threads in usual_threads()
    command = COMMAND if usual else f"{COMMAND} --threads {threads}"
    problem = f" ({known.problem})" if known.problem else ""
    return None, f"run `{command}` for shares of this host's ceilings with {counted(threads)}{problem}."


def counted(threads: int) -> str:
    """Return "1 thread" or "4 threads"."""
    return f"{threads} thread{'s' if threads > 1 else ''}"


def usual_threads() -> tuple[int, ...]:
    """Return the numbers of threads to measure when none is asked for: one, and all that this process may use."""
    return tuple(sorted({1, len(facts.affinity())}))


def host_key(backend: str) -> Mapping[str, str]:
    """Return what ceilings are of: the host, the backend and the versions of what does the work."""
    versions = {"numpy": metadata.version("numpy"), **configured(Runner(backend=backend)).fingerprint()}
    host = {f"host.{name}": value for name, value in facts.host_identity().items()}
    return {"backend": backend, **host, **{f"env.{name}": value for name, value in versions.items()}}


def cache_path() -> Path:
    """Return where ceilings are kept: `$XDG_CACHE_HOME/vbpipe/ceilings.json`, by default below ~/.cache.

    Raises:
        UsageError: XDG_CACHE_HOME is not set, and this user has no home.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():  # the specification has relative ones ignored
        try:
            folder = Path.home() / ".cache"
        except RuntimeError as error:
            raise UsageError("this user has no home folder.", hint="Set XDG_CACHE_HOME.") from error
    return folder / "vbpipe" / "ceilings.json"


def load(key: Mapping[str, str], path: Path | None = None) -> Known:
    """Return what was kept under exactly this key, in the order of thread counts. Never raises."""
    try:
        entries = _read(path or cache_path())
    except UsageError as error:
        return Known((), str(error))
    found = [entry.ceilings for entry in entries if entry.key == key]
    return Known(tuple(sorted(found, key=lambda one: one.threads)))


def save(key: Mapping[str, str], measured: Sequence[Ceilings], path: Path | None = None) -> Path:
    """Keep ceilings under this key, in place of older ones of as many threads, and return the file.

    A file that can't be understood is replaced. Of two that save at the same moment, one is kept.

    Raises:
        UsageError: it can't be written.
    """
    place = path or cache_path()
    try:
        kept = _read(place)
    except UsageError:
        kept = ()
    counts = {one.threads for one in measured}
    others = (entry for entry in kept if entry.key != key or entry.ceilings.threads not in counts)
    body = _File(_FORMAT, (*others, *(_Entry(key, one) for one in measured)))
    part = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(_FILE.dump_json(body, indent=1) + b"\n")
        part.replace(place)
    except OSError as error:
        raise UsageError(
            f"ceilings can't be kept: {error.strerror}.", where=str(place), hint="Set XDG_CACHE_HOME to another folder."
        ) from error
    return place


def main(arguments: Sequence[str]) -> None:
    """Measure one thing and write it to a file, as `_child` asks for."""
    what, threads, subject, parent, reply = arguments
    die_with(int(parent))
    found: Mapping[str, Any]
    if what == "bandwidth":
        found = {"gb_s": bandwidth_gb_s(int(threads), None if subject == "default" else int(subject))}
    else:
        backend = configured(Runner(backend=subject))
        assert isinstance(backend, Measurable), "only those are asked"
        found = dict(backend.ceilings(int(threads)))
    Path(reply).write_text(json.dumps(found), encoding="utf-8")


@dataclass(frozen=True)
class _Entry:
    key: Mapping[str, str]
    ceilings: Ceilings


@dataclass(frozen=True)
class _File:
    format: Literal[1]
    entries: tuple[_Entry, ...]


_FORMAT: Literal[1] = 1
_FILE = TypeAdapter(_File)


def _child(what: Literal["bandwidth", "rates"], threads: int, subject: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="vbpipe-ceilings-") as folder:
        reply = Path(folder) / "reply.json"
        command = python_command(__name__, what, str(threads), subject, str(os.getpid()), str(reply))
        try:
            # stdout is for the caller's JSON; what a library prints there is of no use to anybody.
            done = subprocess.run(
                command,
                env=environment(1 if what == "bandwidth" else threads),  # bandwidth's threads are its own, not BLAS's
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise EngineError(f"no answer for {_TIMEOUT_S:g} s.", where=f"measuring {what}") from error
        if done.returncode or not reply.exists():
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise EngineError(f"{describe_exit(done.returncode)} {last}".strip(), where=f"measuring {what}")
        found: dict[str, Any] = json.loads(reply.read_bytes())
        return found


def _read(path: Path) -> tuple[_Entry, ...]:
    try:
        return _FILE.validate_json(path.read_bytes()).entries
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise UsageError(f"it can't be read: {error.strerror}.", where=str(path)) from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"it is ignored: {place + ': ' if place else ''}{first['msg']}.", where=str(path)) from error
