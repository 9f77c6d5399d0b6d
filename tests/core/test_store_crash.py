"""Killed, raced, full, read-only: the store keeps what was finished and serves nothing else."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vbpipe.core import Artifact, CacheKey
from vbpipe.errors import StoreError
from vbpipe.store import Holder, Store
from vbpipe.store.locks import flocked, is_held

KEY = CacheKey({"stage": "export"})


def key_of(number: int) -> CacheKey:
    return CacheKey({"stage": "export", "n": str(number)})


def put(store: Store, key: CacheKey = KEY, data: bytes = b"model" * 1000) -> Artifact:
    with store.workspace() as work:
        (work / "out" / "deep").mkdir(parents=True)
        (work / "out" / "model.onnx").write_bytes(data)
        (work / "out" / "deep" / "w.bin").write_bytes(data[::-1])
        return store.put(key, "m/v/cpu/export", kind="onnx", source_dir=work / "out", meta={}, seconds=1)


def forked(work: Callable[[], None]) -> int:
    """Run `work` in a child process and return its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    with contextlib.suppress(BaseException):
        work()
        status = 0
    os._exit(status)


def ended(pid: int) -> int:
    """Return the exit status; negative is the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.001)


def test_every_finished_result_survives_kills_at_random_moments(tmp_path: Path) -> None:
    store, finished = Store(tmp_path / "store"), tmp_path / "finished"
    chance = random.Random(7)
    finished.touch()
    for round_number in range(25):
        before = finished.read_text()

        def work(first: int = round_number * 1000) -> None:
            with finished.open("a") as log:
                for number in range(first, first + 1000):
                    put(store, key_of(number), data=str(number).encode() * 2000)
                    log.write(f"{number}\n")
                    log.flush()

        pid = forked(work)
        wait_until(lambda before=before: finished.read_text() != before)  # type: ignore[misc]
        time.sleep(chance.uniform(0, 0.03))
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == -signal.SIGKILL
        assert store.verify().damaged == ()
    numbers = [int(line) for line in finished.read_text().splitlines()]
    assert len(numbers) >= 25
    for number in numbers:
        found = store.get(key_of(number))
        assert found is not None
        assert (found.path / "model.onnx").read_bytes() == str(number).encode() * 2000
    with store.workspace() as only:
        assert {path.name for path in store.layout.tmp.iterdir()} == {only.name, f"{only.name}.lock"}


def _nothing(_: Store) -> None: ...


def _other_result(store: Store) -> None:
    put(store, data=b"older")


def _damaged_result(store: Store) -> None:
    (put(store).path / "model.onnx").unlink()


def _collect(store: Store) -> None:
    store.gc(keep_days=0, newest=0, grace_s=0)


@pytest.mark.parametrize(
    ("before", "act", "may_miss"),
    [
        (_nothing, put, True),
        (_other_result, put, False),
        (_damaged_result, put, True),
        (put, _collect, True),
    ],
    ids=["first put", "put over another", "put over damage", "collection"],
)
def test_a_kill_after_any_single_action_leaves_the_old_state_or_the_new(
    tmp_path: Path, before: Callable[[Store], object], act: Callable[[Store], object], may_miss: bool
) -> None:
    whole = put(Store(tmp_path / "whole"))
    older = put(Store(tmp_path / "older"), data=b"older")
    status, point = -signal.SIGKILL, 0
    while status == -signal.SIGKILL:
        store = Store(tmp_path / f"store-{point}", lambda _: None)
        before(store)
        status = ended(forked(lambda store=store, point=point: killed_at(point, lambda: act(store))))  # type: ignore[misc]
        assert before is _damaged_result or store.verify().damaged == ()
        found = store.get(KEY)
        assert found.digest in (whole.digest, older.digest) if found else may_miss
        assert put(store).digest == whole.digest
        assert list(store.layout.tmp.iterdir()) == []
        assert store.verify().ok
        point += 1
    assert status == 0
    assert (found is None) == (act is _collect)
    assert point > 10


def killed_at(point: int, act: Callable[[], object]) -> None:
    """Run `act`, and die by SIGKILL right after its file system action number `point`."""
    actions = {"open", "write", "mkdir", "rename", "replace", "rmdir", "unlink"}
    seen = 0

    def watch(_: object, event: str, function: object) -> None:
        nonlocal seen
        if event == "c_return" and getattr(function, "__name__", "") in actions:
            if seen == point:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.setprofile(watch)
    act()


def test_of_eight_processes_one_makes_the_step_and_all_get_it(tmp_path: Path) -> None:
    store, made, got, gate = Store(tmp_path / "store"), tmp_path / "made", tmp_path / "got", tmp_path / "gate"

    def work() -> None:
        wait_until(gate.exists)
        with store.locked(KEY):
            artifact = store.get(KEY)
            if artifact is None:
                with made.open("a") as log:
                    log.write("made\n")
                time.sleep(0.02)
                artifact = put(store)
        with got.open("a") as log:
            log.write(f"{artifact.digest}\n")

    pids = [forked(work) for _ in range(8)]
    gate.write_text("go")
    assert [ended(pid) for pid in pids] == [0] * 8
    assert made.read_text() == "made\n"
    assert len(got.read_text().split()) == 8
    assert len(set(got.read_text().split())) == 1


def test_puts_of_equal_bytes_at_once_share_one_object(tmp_path: Path) -> None:
    store, gate = Store(tmp_path / "store"), tmp_path / "gate"

    def work(number: int) -> None:
        wait_until(gate.exists)
        for _ in range(5):
            put(store, key_of(number))

    pids = [forked(lambda number=number: work(number)) for number in range(4)]  # type: ignore[misc]
    gate.write_text("go")
    assert [ended(pid) for pid in pids] == [0] * 4
    report = store.verify()
    assert (report.entries, report.objects, report.damaged) == (4, 1, ())


def test_who_waits_is_told_for_whom_and_goes_on_when_that_process_is_killed(tmp_path: Path) -> None:
    store, ready = Store(tmp_path / "store"), tmp_path / "ready"

    def hold() -> None:
        with store.locked(KEY):
            ready.write_text("yes")
            time.sleep(60)

    pid = forked(hold)
    wait_until(ready.exists)
    waited: list[Holder] = []

    def kill(holder: Holder) -> None:
        waited.append(holder)
        os.kill(pid, signal.SIGKILL)

    with store.locked(KEY, on_wait=kill):
        assert [holder.pid for holder in waited] == [pid]
    ended(pid)
    with store.locked(KEY, on_wait=kill):
        assert len(waited) == 1


def test_a_lock_whose_file_was_removed_while_it_was_waited_for_still_excludes(tmp_path: Path) -> None:
    path, waiting, leave = tmp_path / "lock", threading.Event(), threading.Event()
    inside = threading.Event()

    def wait() -> None:
        with flocked(path, on_wait=lambda _: waiting.set()):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=wait)
    with flocked(path):
        thread.start()
        assert waiting.wait(10)
        path.unlink()
    assert inside.wait(10)
    assert is_held(path)
    leave.set()
    thread.join(10)
    assert not is_held(path)


def test_what_a_reader_got_during_a_collection_stays(tmp_path: Path) -> None:
    old, long_ago = Store(tmp_path / "old"), time.time() - 1e7
    keys = [key_of(number) for number in range(20)]
    for number, key in enumerate(keys):
        path = put(old, key, data=str(number).encode()).path
        os.utime(path, (long_ago, long_ago))
        os.utime(old.layout.entry(key.digest), (long_ago, long_ago))
    for attempt in range(12):
        store = Store(tmp_path / f"copy-{attempt}")
        shutil.copytree(old.root, store.root)
        collection = threading.Thread(target=lambda store=store: store.gc(keep_days=1, newest=0))
        collection.start()
        time.sleep(attempt * 0.0005)
        found = [artifact for key in reversed(keys) if (artifact := store.get(key))]
        collection.join()
        assert [artifact for artifact in found if not (artifact.path / "model.onnx").exists()] == []


def test_locks_of_two_keys_do_not_exclude_each_other(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.locked(key_of(1)), store.locked(key_of(2)):
        pass


def test_steps_share_the_host_and_a_measurement_has_it_alone_before_later_steps(tmp_path: Path) -> None:
    store, order = Store(tmp_path), list[str]()
    measuring, later = threading.Event(), threading.Event()

    def measure() -> None:
        with store.host_lock(exclusive=True, on_wait=lambda _: measuring.set()):
            order.append("measure")

    def step() -> None:
        with store.host_lock(exclusive=False, on_wait=lambda _: later.set()):
            order.append("later step")

    with store.host_lock(exclusive=False):
        with store.host_lock(exclusive=False):
            order.append("two steps")
        threads = [threading.Thread(target=measure), threading.Thread(target=step)]
        for thread, waits in zip(threads, (measuring, later), strict=True):
            thread.start()
            assert waits.wait(10)
        order.append("first step ends")
    for thread in threads:
        thread.join(10)
    assert order == ["two steps", "first step ends", "measure", "later step"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"can't mount a small file system: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill_disk(folder: Path, leave_bytes: int = 0) -> Path:
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    os.truncate(filler, max(0, filler.stat().st_size - leave_bytes))
    return filler


@pytest.mark.parametrize("pages", [0, 1, 2, 3])
def test_a_full_disk_is_an_error_that_says_so_and_leaves_no_entry(disk: Path, pages: int) -> None:
    store = Store(disk / "store")
    before = put(store, key_of(0))
    with store.workspace() as work:
        (work / "out").mkdir()
        (work / "out" / "model.onnx").write_bytes(b"x" * 5000)
        filler = fill_disk(disk, pages * 4096)
        try:
            store.put(KEY, "i", kind="onnx", source_dir=work / "out", meta={"pad": "y" * 13_000}, seconds=1)
        except StoreError as error:
            assert "No space left on device" in error.what
            assert "vbpipe store gc" in error.hint
        else:
            pytest.fail("the entry does not fit")
    assert store.peek(KEY) is None
    assert store.get(key_of(0)) == before
    assert list(store.layout.tmp.iterdir()) == []
    assert (store.verify().damaged, store.verify().orphans) == ((), ())
    filler.unlink()
    assert put(store) == store.get(KEY)


def test_a_collection_frees_a_full_disk(disk: Path) -> None:
    store = Store(disk / "store")
    put(store, data=b"x" * 100_000)
    fill_disk(disk)
    report = store.gc(keep_days=0, newest=0, grace_s=0)
    assert report.freed == 200_000
    (disk / "now").write_bytes(bytes(150_000))


def test_a_read_only_store_serves_hits_and_says_why_it_keeps_nothing(disk: Path) -> None:
    warnings: list[str] = []
    store = Store(disk / "store", warnings.append)
    kept, harmed = put(store), put(store, key_of(1), data=b"other")
    (harmed.path / "model.onnx").chmod(0o644)
    (harmed.path / "model.onnx").write_bytes(b"OTHER")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert store.get(KEY, "another/name") == kept
    assert store.get(key_of(1)) is None
    assert "Read-only file system" in warnings[0]
    assert len(store.verify().damaged) == 1
    assert store.gc(keep_days=0, newest=0, grace_s=0, dry_run=True).kept == 0
    for use in (lambda: put(store), lambda: store.gc(), lambda: store.locked(KEY).__enter__()):
        with pytest.raises(StoreError, match="Read-only file system"):
            use()
