"""Divide a time budget: how long to warm up, how many rounds, how many calls a block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from vbpipe.measure.record import Settings

Pair = tuple[str, str]
"""A candidate and a scenario, by name."""

_MAX_CALLS = 200  # bounds the raw values of calls that take microseconds
_MAX_ROUNDS = 20
_GOOD_ROUNDS = 4  # below this the median over rounds is one spike away from wrong
_EXCHANGE_S = 0.003  # two messages and two process switches
_WARMUP_SHARE = 0.25  # no more: where time is short, every block still begins with an untimed call


@dataclass(frozen=True)
class BlockPlan:
    """An even number of rounds (an order, then its reverse) and the timed calls of each pair's blocks."""

    rounds: int
    calls: Mapping[Pair, int]


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


def plan_blocks(call_s: Mapping[Pair, float], allowed_s: float, start_s: float, settings: Settings) -> BlockPlan:
    """Choose rounds and calls for a group.

    Blocks take as long as the starts and warm-ups did (`start_s`): with within-group and between-group noise of like
    size, that is near the optimum of the two-stage design, n = sqrt(cost between / cost within * var within / var
    between) (Cochran, Sampling Techniques, 10.6). Where that is not affordable, blocks get shorter first, then fewer.
    """
    if not call_s:
        return BlockPlan(0, {})
    block_s = settings.block_s
    calls = _calls(call_s, block_s)
    while _round_s(call_s, calls, settings) * _GOOD_ROUNDS > allowed_s and max(calls.values()) > 1:
        block_s /= 1.5
        calls = _calls(call_s, block_s)
    one_round_s = _round_s(call_s, calls, settings)
    wanted = max(_GOOD_ROUNDS, math.ceil(start_s / one_round_s))
    affordable = math.floor(allowed_s / one_round_s)
    rounds = max(2, min(wanted, affordable, _MAX_ROUNDS))
    return BlockPlan(rounds - rounds % 2, calls)


def _calls(call_s: Mapping[Pair, float], block_s: float) -> dict[Pair, int]:
    return {pair: max(1, min(_MAX_CALLS, round(block_s / max(each_s, 1e-9)))) for pair, each_s in call_s.items()}


def _round_s(call_s: Mapping[Pair, float], calls: Mapping[Pair, int], settings: Settings) -> float:
    """Return the time of one block of every pair: an untimed call, the timed ones, silence and messages."""
    quiet_s = settings.settle_s + _EXCHANGE_S
    return sum((calls[pair] + 1) * each_s + quiet_s for pair, each_s in call_s.items())
