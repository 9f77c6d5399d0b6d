"""Facts about the host that a reader of times needs, and the part of them that identifies it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
    "sve",
)
"""Processor features that decide which kernels a library picks."""

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class HostFacts:
    """The host at one moment. None: this system does not tell.

    Args:
        cores: logical processors that are online.
        affinity: those that this process may use.
        cpu_quota: the cgroup's limit in cores.
        throttled: periods in which that limit stopped the cgroup, so far.
    """

    processor: str
    architecture: str
    flags: tuple[str, ...]
    cores: int
    affinity: tuple[int, ...]
    governor: str | None
    memory_mib: int | None
    cpu_quota: float | None
    throttled: int | None
    load_1m: float
    kernel: str
    python: str


@dataclass(frozen=True)
class CpuTicks:
    """Processor time of the whole host since its start, in clock ticks: all of it, not idle, taken by a hypervisor."""

    total: int
    busy: int
    steal: int


def host_facts() -> HostFacts:
    """Read the facts; takes about a millisecond, and never raises for a fact that can't be read."""
    described = _cpuinfo()
    flags = set(described.get("flags", described.get("Features", "")).split())
    return HostFacts(
        processor=described.get("model name") or platform.processor() or "unknown",
        architecture=platform.machine(),
        flags=tuple(flag for flag in FLAGS if flag in flags),
        cores=os.cpu_count() or 1,
        affinity=affinity(),
        governor=_read(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")) or None,
        memory_mib=_memory_mib(),
        cpu_quota=_cpu_quota(),
        throttled=throttled_periods(),
        load_1m=load_1m(),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
    )


def host_identity() -> Mapping[str, str]:
    """Return what makes times from two hosts comparable, as short strings for a cache key: no load and no clock."""
    facts = host_facts()
    return {
        "processor": f"{facts.processor} ({facts.architecture})",
        "flags": " ".join(facts.flags),
        "cores": f"{len(facts.affinity)} of {facts.cores}",
        "quota": "none" if facts.cpu_quota is None else f"{facts.cpu_quota:g}",
        "kernel": facts.kernel,
    }


def affinity() -> tuple[int, ...]:
    """Return the cores that this process may use, in ascending order."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def load_1m() -> float:
    """Return the load average over the last minute; 0.0 where there is none."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


def throttled_periods() -> int | None:
    """Return how often the cgroup's quota has stopped its processes so far; None without a cgroup."""
    for path in (_cgroup_v2() / "cpu.stat", _CGROUP / "cpu" / "cpu.stat"):
        for line in _read(path).splitlines():
            name, _, value = line.partition(" ")
            if name == "nr_throttled":
                return int(value)
    return None


def cpu_ticks() -> CpuTicks:
    """Read the host's processor time."""
    return _stat().get("cpu", CpuTicks(0, 0, 0))


def core_ticks() -> dict[int, CpuTicks]:
    """Read the processor time of every core; empty where the system does not tell."""
    return {int(name[3:]): ticks for name, ticks in _stat().items() if name[3:].isdigit()}


@cache
def sibling_rank(core: int) -> int:
    """Return 0 for the first logical processor of its physical core, 1 for the next one, and 0 where unknown."""
    shared = _read(Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"))
    return sum(other < core for other in _core_list(shared))


def process_ticks(pid: int) -> int:
    """Return the processor time of a process, all its threads included, in clock ticks; 0 for one that is gone."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0


def _stat() -> dict[str, CpuTicks]:
    """Read /proc/stat: "cpu" and "cpuN" to user nice system idle iowait irq softirq steal, in that order."""
    found: dict[str, CpuTicks] = {}
    for line in _read(Path("/proc/stat")).splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and len(fields) >= 8:
            user, nice, system, idle, iowait, irq, softirq, steal = (int(field) for field in fields[:8])
            busy = user + nice + system + irq + softirq
            found[name] = CpuTicks(busy + idle + iowait + steal, busy, steal)
    return found


def _core_list(text: str) -> list[int]:
    """Return the cores of a kernel list ("0-2,8"); empty for anything else."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            return []
        found += range(int(first), int(last or first) + 1)
    return found


def _cpuinfo() -> dict[str, str]:
    first = _read(Path("/proc/cpuinfo")).split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _memory_mib() -> int | None:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) // 1024
    return None


def _cpu_quota() -> float | None:
    quota, _, period = _read(_cgroup_v2() / "cpu.max").partition(" ")
    if not quota:
        quota = _read(_CGROUP / "cpu" / "cpu.cfs_quota_us")
        period = _read(_CGROUP / "cpu" / "cpu.cfs_period_us")
    if not quota.isdigit() or not period.isdigit():
        return None
    return int(quota) / int(period)


def _cgroup_v2() -> Path:
    """Return the folder of this process's own cgroup, or the root's where it can't be told."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        if line.startswith("0::/"):
            own = _CGROUP / line[4:]
            return own if (own / "cpu.stat").exists() else _CGROUP
    return _CGROUP


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
