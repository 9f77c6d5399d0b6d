"""What the measuring process and its workers say to each other: one JSON line each way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import JsonValue, TypeAdapter


@dataclass(frozen=True)
class Load:
    """Inputs of a scenario and, where known, the outputs that are right."""

    scenario: str
    inputs: Path
    expected: Path | None


@dataclass(frozen=True)
class Open:
    """Load an artifact and run every scenario once. Answer: Progress after each of these, then Opened."""

    backend: str
    options: Mapping[str, JsonValue]
    kind: str
    path: Path
    root: Path | None
    threads: int
    cpus: tuple[int, ...] | None
    memory_limit_mib: int | None
    min_cosine: float | None
    slowdown: float
    loads: tuple[Load, ...]
    do: Literal["open"] = "open"


@dataclass(frozen=True)
class Warm:
    """Call until the times settle. Answer: Warmed."""

    scenario: str
    min_calls: int
    min_s: float
    max_s: float
    do: Literal["warm"] = "warm"


@dataclass(frozen=True)
class Pin:
    """Move every thread to these cores. Answer: Pinned."""

    cpus: tuple[int, ...]
    do: Literal["pin"] = "pin"


@dataclass(frozen=True)
class Time:
    """Time one block of `calls`, after `lead` calls that are not timed. Answer: Timed."""

    scenario: str
    lead: int
    calls: int
    settle_s: float
    do: Literal["time"] = "time"


@dataclass(frozen=True)
class Finish:
    """Check the last outputs again, change between scenarios, tell what the process used. Answer: Finished."""

    do: Literal["finish"] = "finish"


@dataclass(frozen=True)
class Progress:
    """Still at it: the time limit starts anew."""

    said: Literal["progress"] = "progress"


@dataclass(frozen=True)
class Opened:
    load_s: float
    first_call_ms: Mapping[str, float]
    said: Literal["opened"] = "opened"


@dataclass(frozen=True)
class Warmed:
    ns: tuple[int, ...]
    stable: bool | None
    said: Literal["warmed"] = "warmed"


@dataclass(frozen=True)
class Pinned:
    said: Literal["pinned"] = "pinned"


@dataclass(frozen=True)
class Timed:
    ns: tuple[int, ...]
    cpu_ns: int
    said: Literal["timed"] = "timed"


@dataclass(frozen=True)
class Finished:
    peak_rss_mib: float
    preempted: int
    major_faults: int
    affinity: tuple[int, ...]
    switch_ms: Mapping[str, float]
    said: Literal["finished"] = "finished"


@dataclass(frozen=True)
class Raised:
    """The backend raised; the traceback is in the log."""

    message: str
    said: Literal["raised"] = "raised"


@dataclass(frozen=True)
class Wrong:
    """The outputs are not those expected."""

    message: str
    said: Literal["wrong"] = "wrong"


Request = Open | Warm | Pin | Time | Finish
Reply = Progress | Opened | Warmed | Pinned | Timed | Finished | Raised | Wrong

REQUEST: TypeAdapter[Request] = TypeAdapter(Request)
REPLY: TypeAdapter[Reply] = TypeAdapter(Reply)
