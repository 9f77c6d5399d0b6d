"""The statistics on synthetic groups, whose truth is known; no clock is read."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vbpipe.measure import Measurement, Outcome, Ratio, ScenarioRun, Settings, Verdict, WorkerRun, host_facts
from vbpipe.measure.concerns import find_concerns
from vbpipe.measure.correctness import cosine, fault
from vbpipe.measure.planning import allowance_s, plan_blocks, round_scatter, warmup_limit_s
from vbpipe.measure.record import Group
from vbpipe.measure.statistics import (
    group_value,
    group_values,
    interval,
    latency,
    midmean,
    noise_floor,
    precise,
    ratio,
    stable,
    t_quantile,
    verdict,
    widen,
)

ROUNDS, CALLS = 4, 3
HOST = host_facts()
Machine = Callable[[random.Random], Callable[[float], float]]
"""A random machine: its generator to a function from time (s since the group began) to a factor on a call's time."""


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [  # Abramowitz and Stegun, table 26.10, and closed forms for 1 and 2 degrees of freedom
        (0.975, 1, math.tan(0.475 * math.pi)),
        (0.975, 2, 0.95 / math.sqrt(2 * 0.975 * 0.025)),
        (0.975, 7, 2.364624),
        (0.975, 9, 2.262157),
        (0.995, 7, 3.499483),
        (0.995, 30, 2.749996),
        (0.95, 120, 1.657651),
        (0.975, 100000, 1.959988),
        (0.5, 4, 0.0),
    ],
)
def test_t_quantiles_agree_with_tables(probability: float, freedom: int, expected: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(expected, abs=2e-6)


def test_an_interval_needs_two_groups() -> None:
    assert interval([]) == (0.0, math.inf)
    assert interval([0.3]) == (0.3, math.inf)
    centre, half = interval([0.1, 0.3])
    assert centre == pytest.approx(0.2)
    assert half == pytest.approx(12.7062 * math.sqrt(0.02) / math.sqrt(2), rel=1e-4)


@given(st.lists(st.floats(-0.5, 0.5), min_size=2, max_size=20), st.floats(0, 0.1))
def test_swapping_the_two_sides_mirrors_the_verdict(values: list[float], floor: float) -> None:
    centre, half = interval(values)
    forward = Ratio("a", "b", "s", math.exp(centre), math.exp(centre - half), math.exp(centre + half), 2, 0.95)
    back = Ratio("b", "a", "s", math.exp(-centre), math.exp(-centre - half), math.exp(-centre + half), 2, 0.95)
    mirrored = {"faster": "slower", "slower": "faster", "same": "same", "inconclusive": "inconclusive"}
    edges = (abs(centre - half), abs(centre + half), abs(centre))
    least, _ = widen(forward.value, forward.low, forward.high, floor)
    close = min(*(abs(edge - math.log(1.02)) for edge in edges), abs(least - 1)) < 1e-9
    if not close:
        assert verdict(back, 0.02, floor) == mirrored[verdict(forward, 0.02, floor)]


@pytest.mark.parametrize(
    ("value", "half", "margin", "floor", "expected"),
    [  # half widths and floors on the log scale; 0.03 and 0.04 make 0.05
        (0.051, 0.03, 0.02, 0.04, "faster"),
        (0.049, 0.03, 0.02, 0.04, "inconclusive"),
        (-0.051, 0.03, 0.02, 0.04, "slower"),
        (-0.049, 0.03, 0.02, 0.04, "inconclusive"),
        (0.019, 0.001, 0.02, 0.001, "same"),
        (0.021, 0.001, 0.02, 0.001, "faster"),
        (0.015, 0.014, 0.02, 0.0, "inconclusive"),
        (0.0, 0.01, 0.02, 0.0, "same"),
        (0.0, 0.01, 0.02, 0.2, "inconclusive"),
        (0.0, 0.1, 0.2, 0.1, "same"),
        (0.5, math.inf, 0.02, 0.0, "inconclusive"),
        (0.5, 0.01, 0.02, math.inf, "inconclusive"),
        (0.5, math.inf, 0.02, math.inf, "inconclusive"),
    ],
)
def test_a_verdict_needs_more_than_interval_and_noise_together_and_more_than_the_margin(
    value: float, half: float, margin: float, floor: float, expected: str
) -> None:
    low, high = (math.exp(value - half), math.exp(value + half)) if half < math.inf else (0.0, math.inf)
    found = Ratio("a", "b", "s", math.exp(value), low, high, 8, 0.95)
    assert verdict(found, math.expm1(margin), math.expm1(floor)) == expected


def steady(_chance: random.Random) -> Callable[[float], float]:
    return lambda _at: 1.0


def drifting(chance: random.Random) -> Callable[[float], float]:
    slope = chance.uniform(-0.3, 0.3)
    return lambda at: 1.0 + slope * at


def stepping(chance: random.Random) -> Callable[[float], float]:
    when, size = chance.uniform(0, 1), chance.choice((0.7, 1.5))
    return lambda at: size if at > when else 1.0


def bursty(chance: random.Random) -> Callable[[float], float]:
    bursts = [(start, start + chance.uniform(0.01, 0.05)) for start in (chance.uniform(0, 1) for _ in range(4))]
    return lambda at: 1.8 if any(begin < at < end for begin, end in bursts) else 1.0


def identity_of_normal(chance: random.Random) -> float:
    return math.exp(chance.gauss(0, 0.01))


def identity_of_two_kinds(chance: random.Random) -> float:
    """Return the factor of a process that is, one time in three, 8 % slower for its whole life."""
    return 1.08 * math.exp(chance.gauss(0, 0.003)) if chance.random() < 1 / 3 else math.exp(chance.gauss(0, 0.003))


def simulated_group(
    chance: random.Random,
    slowness: Mapping[str, float],
    machine: Machine,
    identity: Callable[[random.Random], float],
    rounds: int = ROUNDS,
) -> Group:
    """Return one group in the protocol's own order, whose workers are slower by factors that are known.

    Order effects: the first block of a round is 4 % slower, and the first call after another candidate 20 %.
    """
    speed, own = machine(chance), {name: factor * identity(chance) for name, factor in slowness.items()}
    blocks: dict[str, list[list[int]]] = {name: [] for name in slowness}
    total, done, previous = rounds * CALLS * len(slowness), 0, ""
    order: list[str] = []
    for turn in range(rounds):
        order = order[::-1] if turn % 2 else chance.sample(list(slowness), len(slowness))
        for place, name in enumerate(order):
            block = []
            for call in range(CALLS):
                after = (1.2 if call == 0 and name != previous else 1.0) * (1.04 if place == 0 else 1.0)
                spike = 3.0 if chance.random() < 0.02 else 1.0
                factor = speed(done / total) * after * spike * math.exp(chance.gauss(0, 0.02))
                block.append(int(1e6 * own[name] * factor))
                done += 1
            blocks[name].append(block)
            previous = name
    return group_of(blocks)


def simulated_run(
    chance: random.Random,
    slowdown: float,
    machine: Machine,
    identity: Callable[[random.Random], float],
    rounds: int = ROUNDS,
    control: str | None = "base#aa",
) -> Measurement:
    """Return a measurement of "cand", slower than "base" by a share, with the protocol's own rule for stopping."""
    slowness = {"base": 1.0, "cand": 1.0 + slowdown} | ({control: 1.0} if control else {})
    groups: list[Group] = []
    settings = Settings(min_groups=8, max_groups=16, precision=0.01)
    while len(groups) < settings.min_groups or (
        len(groups) < settings.max_groups and not precise(values_of(groups), settings)
    ):
        groups.append(simulated_group(chance, slowness, machine, identity, rounds))
    outcomes = tuple(Outcome(name, "measured") for name in slowness)
    return Measurement("base", control, ("s",), settings, HOST, 1.0, tuple(groups), outcomes)


def values_of(groups: Sequence[Group]) -> list[float]:
    found = [group_value(group, "cand", "base", "s") for group in groups]
    return [value for value in found if value is not None]


def judged(found: Measurement) -> tuple[Verdict, Ratio]:
    speedup = ratio(found, "cand", "base", "s")
    return verdict(speedup, 0.02, noise_floor(found, "s")), speedup


@pytest.mark.parametrize("rounds", [ROUNDS, 16])
@pytest.mark.parametrize("identity", [identity_of_normal, identity_of_two_kinds])
@pytest.mark.parametrize("machine", [steady, drifting, stepping, bursty])
def test_equal_candidates_are_called_different_in_at_most_one_of_twenty_runs(
    machine: Machine, identity: Callable[[random.Random], float], rounds: int
) -> None:
    runs = 1000
    found = [judged(simulated_run(random.Random(seed), 0.0, machine, identity, rounds=rounds)) for seed in range(runs)]
    missed = sum(not speedup.low <= 1 <= speedup.high for _, speedup in found)
    # 50 of 1000 are expected at 5 %; 99 % of honest procedures stay at or below 67 (binomial)
    assert missed <= 67
    assert sum(verdict in ("faster", "slower") for verdict, _ in found) <= 10
    assert sum(speedup.low > 1.02 or speedup.high < 1 / 1.02 for _, speedup in found) <= 10


@pytest.mark.parametrize(("machine", "power"), [(steady, 0.9), (drifting, 0.9), (stepping, 0.75), (bursty, 0.35)])
def test_an_interval_without_a_control_lies_beyond_two_percent_in_most_runs(machine: Machine, power: float) -> None:
    runs = 100
    found = [
        ratio(simulated_run(random.Random(seed), 0.05, machine, identity_of_normal, control=None), "cand", "base", "s")
        for seed in range(runs)
    ]
    assert sum(speedup.high < 1 / 1.02 for speedup in found) >= power * runs
    assert sum(speedup.low <= 1 / 1.05 <= speedup.high for speedup in found) >= 0.88 * runs


@pytest.mark.parametrize(("machine", "power"), [(steady, 0.95), (drifting, 0.95), (stepping, 0.85), (bursty, 0.2)])
def test_a_slowdown_of_five_percent_is_found_in_most_runs_against_the_noise_floor(
    machine: Machine, power: float
) -> None:
    runs = 100
    found = [judged(simulated_run(random.Random(seed), 0.05, machine, identity_of_normal)) for seed in range(runs)]
    assert sum(verdict == "slower" for verdict, _ in found) >= power * runs
    assert sum(speedup.low <= 1 / 1.05 <= speedup.high for _, speedup in found) >= 0.88 * runs


def test_many_equal_candidates_with_corrected_intervals_are_rarely_called_different() -> None:
    count, alarms, runs = 6, 0, 100
    level = 1 - 0.05 / (count - 1)
    slowness = {str(index): 1.0 for index in range(count)}
    for seed in range(runs):
        chance = random.Random(seed)
        groups = [simulated_group(chance, slowness, drifting, identity_of_normal) for _ in range(8)]
        values = {name: [group_value(group, name, "0", "s") or 0.0 for group in groups] for name in slowness}
        bounds = [interval(of_one, level) for name, of_one in values.items() if name != "0"]
        alarms += any(abs(centre) > half for centre, half in bounds)
    assert alarms <= 11  # 99 % of procedures at 5 % stay at or below


def measurement(times: dict[str, list[list[list[int]]]], control: str | None = None) -> Measurement:
    """Return a measurement with the given blocks: candidate to group to round to calls, in nanoseconds."""
    count = len(next(iter(times.values())))
    groups = tuple(group_of({name: blocks[index] for name, blocks in times.items()}) for index in range(count))
    outcomes = tuple(Outcome(name, "measured") for name in times)
    base = next(iter(times))
    return Measurement(base, control, ("s",), Settings(min_groups=2), HOST, 1.0, groups, outcomes)


def group_of(blocks: Mapping[str, list[list[int]]]) -> Group:
    return Group(
        workers=tuple(worker(name, of_one) for name, of_one in blocks.items()),
        orders={},
        wall_s=1.0,
        overhead_s=0.5,
        load_1m=0.0,
        steal_share=0.0,
        throttled=0,
        other_cpus=0.0,
    )


def worker(name: str, blocks: list[list[int]], stable: bool | None = True, cpus_used: float = 1.0) -> WorkerRun:
    run = ScenarioRun(1.0, (1, 1), stable, tuple(tuple(block) for block in blocks), cpus_used)
    return WorkerRun(name, 1.0, 0.5, 100.0, 0, 0, (0,), {"s": run})


def test_the_midmean_leaves_a_quarter_at_each_end_out() -> None:
    assert midmean([5.0]) == 5.0
    assert midmean([1.0, 2.0, 9.0]) == 4.0
    assert midmean([-100.0, 1.0, 2.0, 100.0]) == 1.5
    assert midmean([1e9, 1.0, 1.0, 1.0, 1.0, 1.0, -1e9, 1.0]) == 1.0


def test_scatter_is_that_of_the_rounds_within_a_group() -> None:
    found = measurement({"base": [[[100], [100]], [[100], [100]]], "cand": [[[100], [100]], [[100], [150]]]})
    assert round_scatter(found.groups[:1]) == 0
    assert round_scatter(found.groups[1:]) == pytest.approx(math.log(1.5) / math.sqrt(2))
    assert round_scatter([]) > 0


def test_more_rounds_are_planned_where_they_scatter_more() -> None:
    call_s = {("a", "s"): 0.002, ("b", "s"): 0.002}
    quiet, noisy = (plan_blocks(call_s, 1e3, 1.0, each, Settings()).rounds for each in (0.001, 0.1))
    assert quiet < noisy


def test_a_ratio_is_the_mean_over_groups_of_the_midmean_over_rounds() -> None:
    found = measurement(
        {
            "base": [[[200], [900], [200], [100]], [[300], [300], [300], [300]]],
            "cand": [[[100], [100], [100], [100]], [[100], [100], [100], [100]]],
        }
    )
    assert group_values(found, "cand", "base", "s") == pytest.approx((math.log(2), math.log(3)))
    speedup = ratio(found, "cand", "base", "s")
    assert speedup.value == pytest.approx(math.sqrt(6))
    assert speedup.groups == 2
    assert ratio(found, "base", "cand", "s").value == pytest.approx(1 / math.sqrt(6))
    assert speedup.half_width == pytest.approx(math.sqrt(speedup.high / speedup.low) - 1)


def test_the_baseline_counts_by_the_mean_of_both_its_workers_but_not_against_itself() -> None:
    times = {"base": [[[200], [200]]] * 2, "cand": [[[100], [100]]] * 2, "base#aa": [[[400], [400]]] * 2}
    found = measurement(times, control="base#aa")
    between = math.log(2) / 2 + math.log(4) / 2
    assert group_values(found, "cand", "base", "s") == pytest.approx((between, between))
    assert group_values(found, "base", "cand", "s") == pytest.approx((-between, -between))
    assert group_values(found, "base#aa", "base", "s") == pytest.approx((-math.log(2), -math.log(2)))
    assert group_values(found, "base", "base#aa", "s") == pytest.approx((math.log(2), math.log(2)))


def test_two_groups_that_disagree_wildly_give_an_interval_without_bounds() -> None:
    found = measurement({"base": [[[200]], [[2000]]], "cand": [[[100]], [[100]]]})
    wild = ratio(found, "cand", "base", "s", comparisons=1000)
    assert (wild.low, wild.high) == (0.0, math.inf)
    assert widen(1.0, 1e-200, 1e200, 0.1) == (0.0, math.inf)


def test_more_comparisons_widen_the_interval() -> None:
    found = measurement({"base": [[[200]], [[210]], [[190]]], "cand": [[[100]], [[104]], [[99]]]})
    one, ten = ratio(found, "cand", "base", "s"), ratio(found, "cand", "base", "s", comparisons=10)
    assert ten.level == pytest.approx(0.995)
    assert ten.low < one.low < one.high < ten.high


def test_the_noise_floor_is_the_far_end_of_the_interval_of_a_against_a() -> None:
    times = {"base": [[[100]], [[100]]], "base#aa": [[[101]], [[99]]]}
    found = measurement(times, control="base#aa")
    same = ratio(found, "base#aa", "base", "s")
    assert noise_floor(found) == pytest.approx(max(same.high, 1 / same.low) - 1)
    assert noise_floor(measurement(times)) == math.inf


def test_a_99th_percentile_needs_662_samples_and_outliers_are_counted_not_dropped() -> None:
    calls = [1_000_000 + index for index in range(330)] + [9_000_000]
    few = latency(measurement({"base": [[calls], [calls[:-1]]]}), "base", "s")
    many = latency(measurement({"base": [[calls], [calls]]}), "base", "s")
    assert few is not None
    assert many is not None
    assert (few.samples, few.p99_ms, few.outliers) == (661, None, 1)
    assert (many.samples, many.outliers) == (662, 2)
    assert many.p99_ms == pytest.approx(np.percentile(calls * 2, 99) / 1e6)
    assert many.p90_ms == pytest.approx(np.percentile(calls * 2, 90) / 1e6)


def test_a_warm_up_is_stable_when_it_is_flat_or_its_drift_drowns_in_noise() -> None:
    assert stable([1.0] * 10)
    assert stable([1.0, 1.3, 0.9, 1.2, 0.8, 1.1, 1.25, 0.85, 1.0, 1.1])
    assert stable([10 - index for index in range(10)]) is False
    assert stable([5.0, 3.0, 2.0, *[1.0] * 10])
    assert stable([1.0] * 3) is None


def test_concerns_name_what_is_wrong() -> None:
    found = measurement({"base": [[[10**6]] * 2] * 8, "cand": [[[10**6]] * 2] * 8})
    codes = {concern.code for concern in find_concerns(found)}
    assert codes == {"no_control"}

    greedy = worker("cand", [[10**6]] * 2, stable=False, cpus_used=2.0)
    bad = tuple(Group((group.workers[0], greedy), {}, 1.0, 0.5, 9.0, 0.05, 3, 1.5) for group in found.groups)
    worse = Measurement("base", None, ("s",), Settings(), found.host, 1.0, bad[:7], found.outcomes)
    codes = {concern.code for concern in find_concerns(worse)}
    assert codes >= {"too_few_groups", "unequal_threads", "warmup_not_stable", "busy_host", "steal", "throttled"}


def test_a_candidate_that_warms_up_in_its_blocks_is_named() -> None:
    warming = [[[1_500_000], [1_200_000], [1_010_000], [1_000_000]]] * 8
    flat = [[[1_000_000]] * 4] * 8
    codes = {concern.code for concern in find_concerns(measurement({"base": flat, "cand": warming}))}
    assert "still_warming" in codes


@given(
    call_s=st.dictionaries(
        st.tuples(st.sampled_from("abcdefghijkl"), st.sampled_from("st")), st.floats(1e-6, 0.5), min_size=1
    ),
    allowed_s=st.floats(0, 100),
    start_s=st.floats(0, 30),
    noise=st.floats(0, 1),
)
def test_a_plan_has_even_rounds_and_at_least_a_call_and_stays_within_what_is_allowed(
    call_s: dict[tuple[str, str], float], allowed_s: float, start_s: float, noise: float
) -> None:
    settings = Settings()
    plan = plan_blocks(call_s, allowed_s, start_s, noise, settings)
    assert plan.rounds >= 2
    assert plan.rounds % 2 == 0
    assert min(plan.calls.values()) >= 1
    assert min(plan.lead.values()) >= 1
    takes_s = plan.rounds * sum((plan.calls[pair] + plan.lead[pair]) * each for pair, each in call_s.items())
    least_s = 2 * sum((1 + plan.lead[pair]) * each for pair, each in call_s.items())
    assert takes_s <= max(allowed_s, least_s * 1.001)


def test_eight_groups_of_twelve_workers_fit_into_two_minutes() -> None:
    """The size of a real use: eager and its control at 70 ms a call, ten engines at 5 to 25 ms, two scenarios."""
    settings, start_s = Settings(budget_s=120), 9.0
    call_s = {(f"c{index}", scenario): 0.005 + 0.002 * index for index in range(10) for scenario in "st"}
    call_s |= {(name, scenario): 0.07 for name in ("eager", "eager#aa") for scenario in "st"}
    left_s = settings.budget_s
    for index in range(8):
        left_s -= start_s
        allowed_s = allowance_s(left_s, 8 - index, start_s)
        warm_s = warmup_limit_s(allowed_s, len(call_s), 2, settings) * len(call_s) / 2
        plan = plan_blocks(call_s, allowed_s - warm_s, start_s + warm_s, 0.1, settings)
        left_s -= warm_s + plan.rounds * sum(
            (plan.calls[pair] + plan.lead[pair]) * each + 0.002 for pair, each in call_s.items()
        )
        assert median(plan.calls.values()) >= 1
    assert left_s > -0.05 * settings.budget_s


@pytest.mark.parametrize(
    ("outputs", "expected", "words"),
    [
        ({"y": np.ones(3)}, {"y": np.ones(3)}, ""),
        ({"y": np.array([1, np.inf])}, {"y": np.array([1, np.inf])}, ""),
        ({"y": np.array([1, np.inf])}, {"y": np.array([1, 2.0])}, "finite"),
        ({"y": np.array([np.nan])}, None, "not finite"),
        ({"y": np.array([1, 0])}, {"y": np.array([0, 1])}, ""),
        ({"y": np.array([1, 0.0])}, {"y": np.array([0, 1.0])}, "cosine"),
        ({"y": [1.0]}, None, "not an array"),
        ([1.0], None, "not a mapping"),
        ({"y": np.ones(3)}, {"y": np.ones((3, 1))}, "shape"),
        ({"y": np.zeros(0)}, {"y": np.zeros(0)}, ""),
        ({"y": np.zeros(2)}, {"y": np.ones(2)}, "cosine"),
    ],
)
def test_outputs_are_wrong_for_their_shape_type_values_or_direction(outputs, expected, words: str) -> None:
    found = fault(outputs, expected, 0.99)
    assert words in found
    assert bool(found) == bool(words)


def test_cosine_survives_halves_that_overflow() -> None:
    big = np.full(1000, 6e4, dtype=np.float16)
    assert cosine(big, big) == pytest.approx(1)
