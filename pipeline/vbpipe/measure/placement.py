"""Choose the cores that the workers of a group share while they are timed.

All of them on the same cores, one at work at a time: two cores of a shared machine differ by several percent, from
second to second, and the scheduler leaves each worker where it first put it. `docs/decisions/0009` has the figures.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from vbpipe.measure import facts

_LOOK_S = 0.1
_LEVELS = 4  # busy shares are compared in quarters: below that a tenth of a second tells nothing


def choose_cores(allowed: Sequence[int], threads: int, chance: random.Random, *, look_s: float = _LOOK_S) -> list[int]:
    """Return `threads` of the allowed cores: the least busy now, of physical cores before their siblings, by chance.

    Takes `look_s` seconds of watching, during which the caller's own processes must be idle. Returns all allowed cores
    where there are no more than `threads`.
    """
    if len(allowed) <= threads:
        return sorted(allowed)
    before = facts.core_ticks()
    time.sleep(look_s)
    busy = busy_shares(before, facts.core_ticks())
    return rank_cores(allowed, busy, {core: facts.sibling_rank(core) for core in allowed}, chance)[:threads]


def busy_shares(before: dict[int, facts.CpuTicks], after: dict[int, facts.CpuTicks]) -> dict[int, float]:
    """Return core to the share of time it was busy between two readings, stolen time included; 0.0 where unknown."""
    found: dict[int, float] = {}
    for core, end in after.items():
        begin = before.get(core, end)
        total = end.total - begin.total
        found[core] = (end.busy - begin.busy + end.steal - begin.steal) / total if total > 0 else 0.0
    return found


def rank_cores(
    allowed: Sequence[int], busy: dict[int, float], siblings: dict[int, int], chance: random.Random
) -> list[int]:
    """Return the allowed cores, best first: by busy share in quarters, then by sibling rank, then by chance."""
    shuffled = chance.sample(sorted(allowed), len(allowed))
    return sorted(shuffled, key=lambda core: (round(busy.get(core, 0.0) * _LEVELS), siblings.get(core, 0)))
