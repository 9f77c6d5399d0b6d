"""Which cores a group's workers share."""

from __future__ import annotations

import random

import pytest

from vbpipe.measure.facts import CpuTicks, _core_list, core_ticks, cpu_ticks
from vbpipe.measure.placement import busy_shares, choose_cores, rank_cores


def test_the_least_busy_cores_come_first_then_first_threads_of_physical_cores() -> None:
    busy = {0: 0.9, 1: 0.02, 2: 0.05, 3: 0.0}
    siblings = {0: 0, 1: 1, 2: 0, 3: 1}
    orders = {tuple(rank_cores([0, 1, 2, 3], busy, siblings, random.Random(seed))) for seed in range(20)}
    assert orders == {(2, 1, 3, 0), (2, 3, 1, 0)}


def test_equal_cores_are_taken_by_chance() -> None:
    firsts = [rank_cores([0, 1], {}, {}, random.Random(seed))[0] for seed in range(40)]
    assert 8 <= sum(firsts) <= 32


def test_stolen_time_makes_a_core_busy() -> None:
    before = {0: CpuTicks(100, 50, 0), 1: CpuTicks(100, 50, 0)}
    after = {0: CpuTicks(110, 50, 5), 1: CpuTicks(110, 51, 0), 2: CpuTicks(10, 10, 0)}
    assert busy_shares(before, after) == pytest.approx({0: 0.5, 1: 0.1, 2: 0.0})


def test_with_as_many_threads_as_cores_there_is_nothing_to_choose() -> None:
    assert choose_cores([3, 1], 2, random.Random(0), look_s=1e9) == [1, 3]
    assert choose_cores([0], 4, random.Random(0), look_s=1e9) == [0]


def test_a_choice_is_among_what_is_allowed() -> None:
    allowed = sorted(core_ticks())
    assert set(choose_cores(allowed, 1, random.Random(0), look_s=0.02)) <= set(allowed)


def test_ticks_of_the_cores_add_up_to_those_of_the_host() -> None:
    host, cores = cpu_ticks(), core_ticks()
    assert sum(ticks.total for ticks in cores.values()) == pytest.approx(host.total, rel=0.01)


@pytest.mark.parametrize(
    ("text", "cores"), [("0", [0]), ("0,4", [0, 4]), ("0-2,8", [0, 1, 2, 8]), ("", []), ("none", [])]
)
def test_kernel_lists_of_cores_are_read(text: str, cores: list[int]) -> None:
    assert _core_list(text) == cores
