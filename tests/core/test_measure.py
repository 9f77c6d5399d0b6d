"""Measuring with real worker processes and a plug-in made for the purpose."""

from __future__ import annotations

import fcntl
import json
import math
import os
import struct
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from vbpipe.errors import UsageError, VbpipeError
from vbpipe.measure import (
    Candidate,
    Measurement,
    Scenario,
    Settings,
    host_facts,
    host_identity,
    latency,
    measure,
    noise_floor,
    ratio,
    verdict,
)
from vbpipe.measure.messages import Load, Open, Opened, Progress
from vbpipe.measure.process import Worker, close_all

BACKEND = '''
"""Misbehaves as its option says; otherwise doubles its input after a fixed time."""
import contextlib, os, sys, time
import numpy as np


class Fake:
    name, source, runs, dialect = "fake", "onnx", frozenset({"engine"}), "standard"

    def __init__(self, mode="good", sleep_ms=1.0, flag=""):
        self.mode, self.sleep_ms, self.flag = mode, sleep_ms, flag
        self.calls = 0

    @contextlib.contextmanager
    def open(self, kind, path, threads, root=None):
        if self.mode == "raise in open":
            raise RuntimeError("no such engine")
        if self.mode == "hang in open":
            time.sleep(3600)
        if self.mode == "grandchild":
            import subprocess
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
            open(self.flag, "w").write(str(child.pid))
            time.sleep(3600)
        yield self.run
        if self.flag:
            open(self.flag, "a").write(f"closed {os.environ['OMP_NUM_THREADS']}\\n")

    def run(self, inputs):
        self.calls += 1
        late = self.calls > 6
        if self.mode == "wakes slowly":
            self.since = 0 if time.monotonic() - getattr(self, "last", 0) > 0.003 else self.since + 1
            if self.since < 3:
                time.sleep(0.004)
            self.last = time.monotonic()
        if self.mode == "abort":
            sys.stderr.write("about to abort\\n")
            os.abort()
        if self.mode == "abort late" and late:
            os.abort()
        if self.mode == "exit" and late:
            os._exit(0)
        if self.mode == "hang" and late:
            time.sleep(3600)
        if self.mode == "print":
            print('{"said": "timed", "ns": [1], "cpu_ns": 1}' * 50)
            os.write(1, b"\\xff\\x00 garbage\\n")
        if self.mode == "raise late" and late:
            raise ValueError("bad shape")
        time.sleep(self.sleep_ms / 1e3)  # not a busy wait: the tests' machine may be busy
        y = inputs["x"] * np.float32(2)
        if self.mode == "nan":
            y = y * np.float32("nan")
        if self.mode == "shape":
            y = y[:1]
        if self.mode == "dtype":
            y = y.astype(np.float64)
        if self.mode == "names":
            return {"z": y}
        if self.mode == "wrong" or (self.mode == "wrong later" and late):
            y = y[::-1].copy()
        return {"y": y}


PLUGIN = Fake
'''

BAD = [
    ("abort", "crashed", "SIGABRT"),
    ("abort late", "crashed", "SIGABRT"),
    ("exit", "crashed", "ended with exit code 0"),
    ("hang", "hung", "no answer"),
    ("raise in open", "failed", "RuntimeError: no such engine"),
    ("raise late", "failed", "ValueError: bad shape"),
    ("nan", "wrong", "not finite"),
    ("shape", "wrong", "shape [1], expected [4]"),
    ("dtype", "wrong", "float64, expected float32"),
    ("names", "wrong", "['z'], expected ['y']"),
    ("wrong", "wrong", "cosine"),
    ("wrong later", "wrong", "after timing"),
]

FAST = Settings(
    min_groups=2,
    max_groups=2,
    budget_s=20,
    warmup_min_calls=5,
    warmup_min_s=0.01,
    warmup_max_s=0.05,
    block_s=0.005,
    call_timeout_s=1.0,
    start_timeout_s=10.0,
    control=False,
)


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put an installed plug-in package with the backend `fake` on the path of the workers."""
    site = tmp_path_factory.mktemp("site")
    backends = site / "fake_plugin" / "backends"
    backends.mkdir(parents=True)
    (site / "fake_plugin" / "__init__.py").write_text("")
    (backends / "__init__.py").write_text("")
    (backends / "fake.py").write_text(BACKEND)
    info = site / "fake_plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vbpipe.plugins]\nfake = fake_plugin\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site))
        yield


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    path = tmp_path_factory.mktemp("inputs") / "inputs.safetensors"
    save_file({"x": np.arange(1, 5, dtype=np.float32)}, path)
    return Scenario("n=4", path)


@pytest.fixture(scope="module")
def among_bad_ones(tmp_path_factory: pytest.TempPathFactory, scenario: Scenario) -> Measurement:
    """Measure two good candidates together with one of every bad kind."""
    folder = tmp_path_factory.mktemp("expected")
    save_file({"y": np.arange(2, 10, 2, dtype=np.float32)}, folder / "expected.safetensors")
    expected = {"n=4": folder / "expected.safetensors"}
    bad = [candidate(folder, mode, mode) for mode, _, _ in BAD]
    asked = [candidate(folder, "base"), *bad, candidate(folder, "good")]
    return measure(asked, [scenario], replace(FAST, budget_s=60), baseline="base", expected=expected)


def candidate(tmp_path: Path, name: str, mode: str = "good", sleep_ms: float = 1.0, flag: str = "") -> Candidate:
    options = {"mode": mode, "sleep_ms": sleep_ms, "flag": flag}
    return Candidate(name, "fake", options, "engine", tmp_path, min_cosine=0.99)


def test_a_faster_candidate_is_called_faster_and_an_equal_one_is_not(tmp_path: Path, scenario: Scenario) -> None:
    settings = replace(FAST, min_groups=4, max_groups=4, control=True)
    times_ms = {"base": 9, "equal": 9, "fast": 2}
    asked = [candidate(tmp_path, name, sleep_ms=sleep_ms) for name, sleep_ms in times_ms.items()]
    found = measure(asked, [scenario], settings, baseline="base")

    floor = noise_floor(found)
    assert found.measured == ("base", "equal", "fast", "base#aa")
    assert verdict(ratio(found, "fast", "base", "n=4"), 0.05, floor) == "faster"
    assert verdict(ratio(found, "base", "fast", "n=4"), 0.05, floor) == "slower"
    assert verdict(ratio(found, "equal", "base", "n=4"), 0.05, floor) in ("same", "inconclusive")
    assert ratio(found, "fast", "base", "n=4").value == pytest.approx(4.5, rel=0.3)


@pytest.mark.parametrize(("mode", "status", "message"), BAD)
def test_a_bad_candidate_is_reported_and_never_timed(
    among_bad_ones: Measurement, mode: str, status: str, message: str
) -> None:
    outcome = among_bad_ones.outcome(mode)
    assert outcome.status == status
    assert message in outcome.message
    assert "not_measured" in [concern.code for concern in among_bad_ones.problems]
    assert latency(among_bad_ones, mode, "n=4") is None
    with pytest.raises(VbpipeError, match="has no times"):
        ratio(among_bad_ones, mode, "base", "n=4")


def test_good_candidates_are_measured_whatever_the_bad_ones_do(among_bad_ones: Measurement) -> None:
    assert among_bad_ones.measured == ("base", "good")
    assert ratio(among_bad_ones, "good", "base", "n=4").groups == 2


def test_the_log_of_a_crash_shows_what_it_printed_and_where_it_was(tmp_path: Path, scenario: Scenario) -> None:
    found = measure([candidate(tmp_path, "bad", "abort")], [scenario], FAST, baseline="bad")
    tail = found.outcome("bad").log_tail
    assert "about to abort" in tail
    assert "fake.py" in tail
    assert found.measured == ()


def test_the_log_of_a_hung_worker_shows_where_it_hangs(tmp_path: Path, scenario: Scenario) -> None:
    settings = replace(FAST, start_timeout_s=2.0)
    found = measure([candidate(tmp_path, "bad", "hang in open")], [scenario], settings, baseline="bad")
    assert found.outcome("bad").status == "hung"
    assert "in open" in found.outcome("bad").log_tail


def test_what_a_backend_prints_never_reaches_the_protocol(tmp_path: Path, scenario: Scenario) -> None:
    asked = [candidate(tmp_path, "base"), candidate(tmp_path, "loud", "print")]
    found = measure(asked, [scenario], FAST, baseline="base")
    assert found.measured == ("base", "loud")
    times = latency(found, "loud", "n=4")
    assert times is not None
    assert times.p50_ms >= 1


def test_calls_right_after_a_switch_are_not_timed(tmp_path: Path, scenario: Scenario) -> None:
    """An engine that was idle is slow for milliseconds; timing that would compare the idling, not the engines."""
    asked = [candidate(tmp_path, "base"), candidate(tmp_path, "sleepy", "wakes slowly")]
    settings = replace(FAST, warmup_min_calls=15)
    slow = {}
    for lead_s in (settings.lead_s, 1e-6):
        found = measure(asked, [scenario], replace(settings, lead_s=lead_s), baseline="base")
        workers = [worker for group in found.groups for worker in group.workers if worker.candidate == "sleepy"]
        calls = [ns for worker in workers for block in worker.runs["n=4"].blocks_ns for ns in block]
        slow[lead_s] = sum(ns > 4e6 for ns in calls) / len(calls)
    assert slow[settings.lead_s] <= 0.2 < slow[1e-6]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core only")
def test_the_workers_of_a_group_share_their_cores_while_they_are_timed(tmp_path: Path, scenario: Scenario) -> None:
    asked = [candidate(tmp_path, "base"), candidate(tmp_path, "b")]
    found = measure(asked, [scenario], FAST, baseline="base")
    for group in found.groups:
        (cores,) = {worker.affinity for worker in group.workers}
        assert len(cores) == 1
    every = tuple(sorted(os.sched_getaffinity(0)))
    free = measure(asked, [scenario], replace(FAST, threads=len(every)), baseline="base")
    assert {worker.affinity for group in free.groups for worker in group.workers} == {every}
    assert "unequal_affinity" not in {concern.code for concern in (*found.problems, *free.problems)}


def test_requests_for_many_calls_may_take_longer_than_one_call_may(tmp_path: Path, scenario: Scenario) -> None:
    """An untimed call, two timed ones and a warm-up of slow calls are no reason to call a worker hung."""
    asked = [candidate(tmp_path, "base", sleep_ms=600)]
    settings = replace(FAST, call_timeout_s=0.9, start_timeout_s=10.0, budget_s=40)
    found = measure(asked, [scenario, Scenario("again", scenario.inputs)], settings, baseline="base")
    assert found.outcome("base").status == "measured"


def test_workers_close_their_engine_and_get_equal_thread_counts(
    tmp_path: Path, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    flag = tmp_path / "flag"
    measure([candidate(tmp_path, "base", flag=str(flag))], [scenario], replace(FAST, threads=2), baseline="base")
    assert flag.read_text().splitlines() == ["closed 2", "closed 2"]


def test_the_time_that_a_hung_worker_took_costs_the_others_no_groups(tmp_path: Path, scenario: Scenario) -> None:
    settings = replace(FAST, min_groups=3, max_groups=3, budget_s=8, start_timeout_s=4.0)
    both = [candidate(tmp_path, "base"), candidate(tmp_path, "bad", "hang in open")]
    found = measure(both, [scenario], settings, baseline="base")
    assert found.outcome("bad").status == "hung"
    assert len(found.groups) == 3


def test_a_measurement_survives_json_unchanged(tmp_path: Path, scenario: Scenario) -> None:
    asked = [candidate(tmp_path, "base"), candidate(tmp_path, "bad", "abort")]
    found = measure(asked, [scenario], FAST, baseline="base")
    assert Measurement.from_json(found.to_json()) == found
    found.save(tmp_path)
    assert Measurement.load(tmp_path) == found
    packed = tmp_path / "measurement.json.gz"
    assert packed.stat().st_size < len(found.to_json())
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(VbpipeError, match="no readable measurement"):
        Measurement.load(tmp_path)


def test_raw_values_hold_every_warm_up_and_block(tmp_path: Path, scenario: Scenario) -> None:
    found = measure([candidate(tmp_path, "base"), candidate(tmp_path, "b")], [scenario], FAST, baseline="base")
    for group in found.groups:
        orders = group.orders["n=4"]
        assert all(later == tuple(reversed(first)) for first, later in zip(orders[::2], orders[1::2], strict=True))
        for worker in group.workers:
            run = worker.runs["n=4"]
            assert len(run.warmup_ns) >= 5
            assert len(run.blocks_ns) == len(orders) >= 2
            assert run.first_call_ms >= 1
            assert worker.start_s >= worker.load_s > 0
            assert worker.peak_rss_mib > 5


def test_a_small_budget_still_holds_the_least_number_of_groups(tmp_path: Path, scenario: Scenario) -> None:
    settings = Settings(budget_s=9, min_groups=8, control=False, precision=1e-9)
    slow = [candidate(tmp_path, "base", sleep_ms=20), candidate(tmp_path, "b", sleep_ms=30)]
    found = measure(slow, [scenario], settings, baseline="base")
    assert len(found.groups) >= 8
    assert found.elapsed_s < 9 * 1.2


def test_a_budget_that_can_not_hold_the_groups_says_how_much_can(tmp_path: Path, scenario: Scenario) -> None:
    found = measure(
        [candidate(tmp_path, "base")],
        [scenario],
        replace(FAST, min_groups=8, max_groups=8, budget_s=1),
        baseline="base",
    )
    assert len(found.groups) < 8
    concern = next(concern for concern in found.problems if concern.code == "too_few_groups")
    assert "are needed" in concern.message
    assert ratio(found, "base", "base", "n=4").half_width in (0, math.inf)


def test_sampling_stops_once_every_ratio_is_precise_enough(tmp_path: Path, scenario: Scenario) -> None:
    settings = replace(FAST, min_groups=2, max_groups=30, precision=0.9)
    found = measure([candidate(tmp_path, "base"), candidate(tmp_path, "b")], [scenario], settings, baseline="base")
    assert len(found.groups) < 6


def test_who_watches_sees_the_ratio_and_its_interval_once_two_groups_are_done(
    tmp_path: Path, scenario: Scenario
) -> None:
    said: list[str] = []
    pair = [candidate(tmp_path, "base"), candidate(tmp_path, "other", sleep_ms=2.0)]
    three = replace(FAST, min_groups=3, max_groups=3)
    measure(pair, [scenario], three, baseline="base", progress=lambda _share, message: said.append(message))
    with_ratio = [message for message in said if message.startswith("other 0.")]
    assert with_ratio
    assert all("x +-" in message and "group 3: " in message for message in with_ratio)
    assert not any("#aa" in message for message in said)


def test_an_interrupt_leaves_no_worker_behind(tmp_path: Path, scenario: Scenario) -> None:
    seen: list[int] = []

    def interrupt(_fraction: float | None, message: str) -> None:
        if "round" in message:
            seen.extend(_workers_of(os.getpid()))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure([candidate(tmp_path, "base")], [scenario], FAST, baseline="base", progress=interrupt)
    assert seen
    assert not [pid for pid in seen if _alive(pid)]


def test_workers_die_with_a_parent_that_is_killed(tmp_path: Path, scenario: Scenario) -> None:
    script = f"""
        from pathlib import Path
        from vbpipe.measure import Candidate, Scenario, Settings, measure
        one = Candidate("base", "fake", {{"mode": "hang in open"}}, "engine", Path("."))
        measure([one], [Scenario("n=4", Path({str(scenario.inputs)!r}))], Settings(), baseline="base")
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    try:
        workers = _wait_for(lambda: _workers_of(parent.pid))
        time.sleep(0.5)  # past the interpreter's start, where the worker asks to die with its parent
    finally:
        parent.kill()
        parent.wait()
    assert workers
    assert _wait_for(lambda: not [pid for pid in workers if _alive(pid)])


def test_a_hung_worker_is_killed_with_the_processes_that_it_started(tmp_path: Path, scenario: Scenario) -> None:
    flag = tmp_path / "pid"
    one = candidate(tmp_path, "base", "grandchild", flag=str(flag))
    measure([one], [scenario], replace(FAST, start_timeout_s=1.5), baseline="base")
    assert _wait_for(lambda: not _alive(int(flag.read_text())))


def test_replies_that_pile_up_are_read_together(tmp_path: Path, scenario: Scenario) -> None:
    """One read may return several lines, after which the pipe is empty: waiting for it again would take for ever."""
    one = candidate(tmp_path, "base")
    loads = (Load(scenario.name, scenario.inputs, None),)
    worker = Worker(tmp_path / "log", 1)
    try:
        worker.send(Open(one.backend, one.options, one.kind, one.path, None, 1, None, None, None, 0.0, loads))
        assert _wait_for(lambda: _readable_bytes(worker.fileno()) > 2 * len('{"said":"progress"}\n'))
        assert [type(reply) for reply in worker.receive()] == [Progress, Progress, Opened]
    finally:
        close_all([worker], at_once=True)


def test_contradicting_arguments_are_refused(tmp_path: Path) -> None:
    one, scenario = candidate(tmp_path, "a"), Scenario("s", tmp_path)
    with pytest.raises(UsageError, match="baseline 'b' is not a candidate"):
        measure([one], [scenario], FAST, baseline="b")
    with pytest.raises(UsageError, match="no two of one name"):
        measure([one, one], [scenario], FAST, baseline="a")
    with pytest.raises(UsageError, match="#aa"):
        measure([candidate(tmp_path, "a#aa")], [scenario], FAST, baseline="a#aa")
    with pytest.raises(UsageError, match="unknown scenarios"):
        measure([one], [scenario], FAST, baseline="a", expected={"t": tmp_path})
    with pytest.raises(UsageError, match="min_groups"):
        Settings(min_groups=1)


def test_json_that_is_no_measurement_is_refused() -> None:
    with pytest.raises(VbpipeError, match="not a measurement"):
        Measurement.from_json('{"groups": 3}')


def test_json_of_another_format_is_refused() -> None:
    empty = Measurement("a", None, ("s",), Settings(), host_facts(), 0.0, (), ())
    newer = json.dumps({**json.loads(empty.to_json()), "format": 99})
    with pytest.raises(VbpipeError, match="format 99"):
        Measurement.from_json(newer)


def test_the_identity_of_a_host_holds_only_what_stays() -> None:
    identity = host_identity()
    assert identity == host_identity()
    assert {"processor", "flags", "cores", "quota", "kernel"} == set(identity)
    assert all(isinstance(value, str) for value in identity.values())


def _workers_of(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = stat.with_name("cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == parent and b"vbpipe.measure.worker" in command:
            found.append(int(stat.parent.name))
    return found


def _readable_bytes(fd: int) -> int:
    return struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"    "))[0]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_for(condition, limit_s: float = 10.0):
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    return condition()
