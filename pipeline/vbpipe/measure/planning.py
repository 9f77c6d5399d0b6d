"""Divide a time budget: how long to warm up, how many rounds, how many calls a block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, stdev

from vbpipe.measure.record import Group, Settings
from vbpipe.measure.statistics import round_ratios

Pair = tuple[str, str]
"""A candidate and a scenario, by name."""

_MAX_CALLS = 200  # bounds the raw values of calls that take microseconds
_LEAST_CALLS = 2  # timed, of slow candidates: each block costs them an untimed one
_MAX_ROUNDS = 80
_GOOD_ROUNDS = 4  # below this the midmean is a mean, and one spike away from wrong
_BETWEEN = 0.007  # scatter of log-ratios from one pair of processes to the next, seen on shared machines
_UNKNOWN_SCATTER = 0.05
_EXCHANGE_S = 0.001  # two messages and two process switches
_WARMUP_SHARE = 0.25  # no more: where time is short, every block still begins with an untimed call


@dataclass(frozen=True)
class BlockPlan:
    """An even number of rounds (an order, then its reverse), and the untimed and timed calls of each pair's blocks."""

    rounds: int
    lead: Mapping[Pair, int]
    calls: Mapping[Pair, int]

    def block_s(self, pair: Pair, call_s: float) -> float:
        """Return how long a block of `pair` takes when a call takes `call_s`."""
        return (self.lead[pair] + self.calls[pair]) * call_s


def allowance_s(remaining_s: float, groups_left: int, start_s: float) -> float:
    """Return the time for warm-up and blocks of a group whose workers have started, so that all groups left fit.

    Args:
        remaining_s: of the budget, now.
        groups_left: this one included; at least one.
        start_s: what starting the workers of a later group will take.
    """
    return max(0.0, (0.97 * remaining_s - (groups_left - 1) * start_s) / groups_left)


def warmup_limit_s(allowed_s: float, pairs: int, slots: int, settings: Settings) -> float:
    """Return the longest warm-up of one worker in one scenario, when `slots` workers warm up at a time."""
    return min(settings.warmup_max_s, _WARMUP_SHARE * allowed_s * slots / max(1, pairs))


def round_scatter(before: Sequence[Group]) -> float:
    """Return the typical standard deviation of the log-ratios of rounds within a group; a guess without any group."""
    found: list[float] = []
    for group in before:
        for other in group.workers[1:]:
            for scenario, run in other.runs.items():
                ratios = round_ratios(run.blocks_ns, group.workers[0].runs[scenario].blocks_ns)
                found += [stdev(ratios)] if len(ratios) > 1 else []
    return median(found) if found else _UNKNOWN_SCATTER


def settle_s(settings: Settings) -> float:
    """Return the silence before a block: a single thread leaves nothing behind that spins."""
    return settings.settle_s if settings.threads > 1 else 0.0


def plan_blocks(
    call_s: Mapping[Pair, float], allowed_s: float, start_s: float, scatter: float, settings: Settings
) -> BlockPlan:
    """Choose rounds and calls for a group.

    The rounds worth taking are those of the two-stage design, n = sqrt(cost of a group / cost of a round) * scatter
    within a group / scatter between groups (Cochran, Sampling Techniques, 10.6). Where they are not affordable, blocks
    get shorter first, then fewer.

    Args:
        call_s: seconds of a call.
        allowed_s: for all blocks.
        start_s: what starting and warming up took.
        scatter: standard deviation of the log-ratios of rounds within a group.
        settings: the aims.
    """
    if not call_s:
        return BlockPlan(0, {}, {})
    block_s, least = settings.block_s, _LEAST_CALLS
    calls = _alike(call_s, block_s, least)
    while _round_s(call_s, calls, settings) * _GOOD_ROUNDS > allowed_s and max(calls.values()) > 1:
        block_s, least = block_s / 1.5, 1
        calls = _alike(call_s, block_s, least)
    one_round_s = _round_s(call_s, calls, settings)
    wanted = max(_GOOD_ROUNDS, math.ceil(math.sqrt(start_s / one_round_s) * scatter / _BETWEEN))
    affordable = math.floor(allowed_s / one_round_s)
    rounds = max(2, min(wanted, affordable, _MAX_ROUNDS))
    return BlockPlan(rounds - rounds % 2, _lead(call_s, settings), calls)


def _lead(call_s: Mapping[Pair, float], settings: Settings) -> dict[Pair, int]:
    """Return the untimed calls before a block. They never shrink: without them fast candidates look slower."""
    return _alike(call_s, settings.lead_s, 1)


def _alike(call_s: Mapping[Pair, float], aim_s: float, least: int) -> dict[Pair, int]:
    """Return how many calls take about `aim_s`: in a scenario the same number for all that are about as fast.

    That is the number for the fastest, where it takes the others at most twice the aim. A worker that takes over gets
    faster from call to call, and a median of five calls is not one of seven: numbers of their own would favour the
    faster one, which is timed later.
    """
    fastest_s: dict[str, float] = {}
    for (_, scenario), each_s in call_s.items():
        fastest_s[scenario] = min(fastest_s.get(scenario, math.inf), max(each_s, 1e-9))
    return {
        pair: max(
            least,
            min(_MAX_CALLS, math.ceil(aim_s / fastest_s[pair[1]]), math.ceil(2 * aim_s / max(each_s, 1e-9))),
        )
        for pair, each_s in call_s.items()
    }


def _round_s(call_s: Mapping[Pair, float], calls: Mapping[Pair, int], settings: Settings) -> float:
    """Return the time of one block of every pair: the untimed calls, the timed ones, silence and messages."""
    quiet_s, lead = settle_s(settings) + _EXCHANGE_S, _lead(call_s, settings)
    return sum((calls[pair] + lead[pair]) * each_s + quiet_s for pair, each_s in call_s.items())
