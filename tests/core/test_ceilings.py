"""What this host can do at most: measured, kept, found again by the right host only, and compared with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vbpipe.cli import app, doctor
from vbpipe.errors import EngineError, UsageError
from vbpipe.measure import bandwidth, ceilings
from vbpipe.measure.ceilings import Ceilings, Known, Shares
from vbpipe.runner import Runner

KEY = {"backend": "b", "host.processor": "one"}
ONE = Ceilings(1, 10.0, {"fp32": 100.0, "int8_u8s8": 400.0, "int8_s8s8": 30.0}, "2026-01-02T03:04:05+00:00")
FOUR = Ceilings(4, None, {"fp32": 350.0}, "2026-01-02T03:04:05+00:00")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "vbpipe" / "ceilings.json"


def test_what_is_saved_is_loaded_and_newer_ones_take_its_place(cache: Path) -> None:
    assert ceilings.load(KEY) == Known(())
    assert ceilings.save(KEY, [FOUR, ONE]) == cache
    assert ceilings.load(KEY).found == (ONE, FOUR)
    newer = Ceilings(1, 11.0, {"fp32": 90.0}, "2026-02-02T03:04:05+00:00")
    ceilings.save(KEY, [newer])
    assert ceilings.load(KEY).found == (newer, FOUR)
    assert ceilings.load(KEY).of(4) == FOUR
    assert ceilings.load(KEY).of(2) is None
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


def test_another_hosts_are_kept_and_never_used() -> None:
    other = {**KEY, "host.processor": "two"}
    ceilings.save(KEY, [ONE])
    assert ceilings.load(other).found == ()
    assert ceilings.load({"backend": "b"}).found == ()
    ceilings.save(other, [FOUR])
    assert (ceilings.load(KEY).found, ceilings.load(other).found) == ((ONE,), (FOUR,))


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"format": 2, "entries": []}',
        b'{"format": 1, "entries": [{"key": {}, "ceilings": {"threads": 1}}]}',
        json.dumps(
            {"format": 1, "entries": [{"key": KEY, "ceilings": {**vars(ONE), "bandwidth_gb_s": -1.0}}]}
        ).encode(),
    ],
)
def test_a_file_that_is_no_cache_is_ignored_with_the_reason_and_replaced(cache: Path, damaged: bytes) -> None:
    cache.parent.mkdir()
    cache.write_bytes(damaged)
    known = ceilings.load(KEY)
    assert known.found == ()
    assert str(cache) in known.problem and "ignored" in known.problem
    ceilings.save(KEY, [ONE])
    assert ceilings.load(KEY) == Known((ONE,))


def test_a_folder_in_its_place_is_said_and_no_crash(cache: Path) -> None:
    cache.mkdir(parents=True)
    assert "can't be read" in ceilings.load(KEY).problem
    with pytest.raises(UsageError, match=r"can't be kept.*XDG_CACHE_HOME"):
        ceilings.save(KEY, [ONE])


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ceilings.cache_path() == tmp_path / ".cache" / "vbpipe" / "ceilings.json"


def test_shares_are_amounts_over_time_over_ceiling() -> None:
    # 0.1 GFLOP in 2 ms are 50 GFLOP/s, half of 100 and an eighth of the better of 400 and 30; 4 MB are 2 GB/s of 10.
    assert ONE.shares(1e8, 4e6, 2.0) == Shares(pytest.approx(0.5), pytest.approx(0.125), pytest.approx(0.2))
    assert ONE.shares(0.0, None, 2.0) == Shares(None, None, None)
    assert FOUR.shares(7e8, 4e6, 2.0) == Shares(pytest.approx(1.0), None, None)


def test_a_target_finds_those_of_its_own_threads_or_the_command_that_adds_them() -> None:
    runner = Runner(backend="onnxruntime")
    found, missing = ceilings.find(runner)
    assert found is None and "`vbpipe doctor --measure`" in missing
    ceilings.save(ceilings.host_key("onnxruntime"), [ONE])
    assert ceilings.find(runner) == (ONE, "")
    found, missing = ceilings.find(runner.model_copy(update={"threads": 77}))
    assert found is None and "`vbpipe doctor --measure --threads 77`" in missing


def test_a_target_on_something_else_gets_none_and_the_reason() -> None:
    ceilings.save(ceilings.host_key("onnxruntime"), [ONE])
    found, missing = ceilings.find(Runner(backend="onnxruntime", options={"providers": ["cuda"]}))
    assert found is None and "this target has others" in missing
    found, missing = ceilings.find(Runner(backend="null"))
    assert found is None and "'null' can't measure" in missing


@pytest.mark.parametrize("threads", [1, 3])
def test_bandwidth_of_little_arrays_is_a_rate(threads: int) -> None:
    found = bandwidth.bandwidth_gb_s(threads, 3 * 2**16)
    assert found is not None and found > 0


def test_arrays_that_the_caches_hold_are_no_memory_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "cache_bytes", lambda: 2**60)
    assert bandwidth.bandwidth_gb_s(1) is None


def test_doctor_says_what_was_measured_and_what_was_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor.examine(tmp_path, as_json=False)
    assert "onnxruntime: not measured: vbpipe doctor --measure" in capsys.readouterr().out
    asked: list[tuple[str, int]] = []

    def measured(backend: str, threads: int, array_bytes: int | None = None) -> Ceilings:
        asked.append((backend, threads))
        return Ceilings(threads, 10.0, {"fp32": 100.0}, ONE.taken)

    monkeypatch.setattr(ceilings, "measure_ceilings", measured)
    doctor.measure_here([3, 1, 3], as_json=False)
    assert asked == [("onnxruntime", 1), ("onnxruntime", 3)]
    assert "fp32 GFLOP/s" in capsys.readouterr().out
    doctor.examine(tmp_path, as_json=False)
    out = capsys.readouterr().out
    assert "onnxruntime, 3 threads: memory 10.0 GB/s, fp32 100 GFLOP/s (2026-01-02)" in out
    assert "not measured" not in out
    doctor.examine(tmp_path, as_json=True)
    said = json.loads(capsys.readouterr().out)["ceilings"]["onnxruntime"]["found"]
    assert [one["threads"] for one in said] == [1, 3]
    cache.write_text("{")
    doctor.examine(tmp_path, as_json=False)
    assert "it is ignored" in capsys.readouterr().out


def test_each_thing_is_measured_in_its_own_process_and_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.measure_here([1], as_json=True, array_bytes=2**20)
    (said,) = json.loads(capsys.readouterr().out)["ceilings"]["onnxruntime"]
    (kept,) = ceilings.load(ceilings.host_key("onnxruntime")).found
    assert said == json.loads(json.dumps(vars(kept)))
    assert kept.bandwidth_gb_s is not None and kept.bandwidth_gb_s > 0
    assert {"fp32", "int8_u8s8", "int8_s8s8"} == kept.rates.keys()


def test_measuring_ceilings_and_trying_the_noise_are_two_commands() -> None:
    with pytest.raises(UsageError, match="--noise and --measure"):
        app.doctor(noise=True, measure=True)


def test_a_process_that_fails_is_an_error_with_its_last_words() -> None:
    with pytest.raises(EngineError, match=r"measuring rates: .*exit code 1.*only those are asked"):
        ceilings.measure_ceilings("null", 1, 2**16)
