"""Trials of the measuring itself, on the built-in workload."""

from __future__ import annotations

import math
from pathlib import Path

from vbpipe import samples
from vbpipe.measure import Candidate, Scenario, Settings, cold_start, latency, measure, noise, probe
from vbpipe.measure.noise import Trial, summarize


def scenario(folder: Path, name: str = "probe") -> Scenario:
    path = folder / f"{name}.safetensors"
    samples.save_arrays(path, probe.inputs())
    return Scenario(name, path)


def trial(delay: float, verdict: str, low: float, high: float, naive: float = 1.0) -> Trial:
    return Trial(delay, 1 / (1 + delay), 1.0, low, high, 0.01, verdict, naive, 8, 1.0)  # type: ignore[arg-type]


def test_a_copy_that_takes_twice_as_long_is_found_and_the_interval_moves_with_it(tmp_path: Path) -> None:
    settings = Settings(min_groups=4, max_groups=4, budget_s=20.0)
    probe_once = Candidate("probe", probe.BACKEND, {}, "", Path())
    found = noise.run_trial(probe_once, scenario(tmp_path), settings, 1.0)
    assert found.truth == 0.5
    assert found.value < 0.8
    assert found.naive < 0.95


def test_cold_start_and_shape_changes_are_read_from_the_workers(tmp_path: Path) -> None:
    settings = Settings(min_groups=2, max_groups=2, budget_s=15.0, control=False)
    scenarios = [scenario(tmp_path, "one"), scenario(tmp_path, "two")]
    found = measure([Candidate("probe", probe.BACKEND, {}, "", Path())], scenarios, settings, baseline="probe")
    cold = cold_start(found, "probe")
    assert cold is not None
    assert cold.first_ms.keys() == cold.switch_ms.keys() == {"one", "two"}
    assert cold.peak_rss_mib > 10
    times = latency(found, "probe", "one")
    assert times is not None
    assert times.p50_ms <= times.p90_ms


def test_shares_are_counted_over_trials() -> None:
    found = summarize([trial(0.0, "same", 0.99, 1.01, 1.05), trial(0.0, "slower", 0.90, 0.95)])
    assert (found.wrong, found.naive_wrong, found.covered) == (0.5, 0.5, 0.5)
    slow = summarize([trial(0.05, "slower", 0.93, 0.97), trial(0.05, "inconclusive", 0.93, 1.01)])
    assert (slow.wrong, slow.found, slow.covered) == (0.0, 0.5, 1.0)


def test_a_trial_of_a_single_group_is_infinitely_wide_and_says_so() -> None:
    alone = summarize([trial(0.0, "inconclusive", 0.0, math.inf)])
    assert alone.half_width == math.inf
    assert "not even two groups" in " ".join(noise.advice([alone], cores=2, load_1m=0.1))


def test_advice_names_what_would_help() -> None:
    noisy = summarize([trial(0.0, "inconclusive", 0.8, 1.2)])
    said = " ".join(noise.advice([noisy], cores=2, load_1m=3.0))
    assert "load is 3.0 on 2 cores" in said
    assert "times the budget" in said
    assert noise.advice([summarize([trial(0.0, "same", 0.99, 1.01)])], cores=2, load_1m=0.1) == ()


def test_the_smallest_delay_found_counts_only_if_all_larger_ones_were_found_too() -> None:
    equal = summarize([trial(0.0, "inconclusive", 0.9, 1.1)])
    missed = {d: summarize([trial(d, "inconclusive", 0.9, 1.1)]) for d in (0.03, 0.05)}
    found = {d: summarize([trial(d, "slower", 0.9, 1.0)]) for d in (0.03, 0.05)}
    assert noise.reliably_found([equal, found[0.03], found[0.05]]) == 0.03
    assert noise.reliably_found([equal, missed[0.03], found[0.05]]) == 0.05
    assert noise.reliably_found([equal, found[0.03], missed[0.05]]) is None
    assert noise.reliably_found([equal]) is None
