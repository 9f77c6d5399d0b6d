"""Plans of fake steps: what is run, what is not, and what is left when something goes wrong."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vbpipe import plugins
from vbpipe.errors import Interrupted
from vbpipe.plan import Plan, Step
from vbpipe.run.executor import RunSettings, StepResult, execute
from vbpipe.store import Holder, Store

pytestmark = pytest.mark.usefixtures("fake_plugin")


class Recorder:
    def __init__(self) -> None:
        self.began: list[str] = []
        self.ended: list[StepResult] = []
        self.notes: list[tuple[float | None, str]] = []
        self.waits: list[Holder] = []

    def started(self, step: Step) -> None:
        self.began.append(step.label)

    def progress(self, step: Step, fraction: float | None, message: str) -> None:
        self.notes.append((fraction, message))

    def waiting(self, step: Step, holder: Holder) -> None:
        self.waits.append(holder)

    def finished(self, result: StepResult) -> None:
        self.ended.append(result)

    def warn(self, message: str) -> None:
        raise AssertionError(message)


def step(name: str, reads: tuple[str, ...] = (), **options: Any) -> Step:
    stage = plugins.stage("fake").model_validate({"step": name, "reads": reads, **options})  # type: ignore[attr-defined]
    return Step(name, name, stage, {kind: kind for kind in reads}, (f"r/v/t/{name}",))


def plan(*steps: Step) -> Plan:
    return Plan("r", {s.id: s for s in steps}, (), {}, {}, {})


def diamond(**last: Any) -> Plan:
    return plan(step("a"), step("b", ("a",)), step("c", ("a",)), step("d", ("b", "c"), **last))


def run(found: Plan, tmp_path: Path, **settings: Any) -> tuple[Mapping[str, StepResult], Recorder]:
    recorder = Recorder()
    asked = RunSettings(root=tmp_path, **{"jobs": 2, **settings})
    return execute(found, Store(tmp_path / "store"), asked, recorder), recorder


def test_steps_run_after_what_they_read_and_get_its_bytes(tmp_path: Path) -> None:
    results, recorder = run(diamond(), tmp_path)
    artifact = results["d"].artifact
    assert artifact is not None
    assert (artifact.path / "out.txt").read_text() == "d(b(a())c(a()))"
    assert recorder.began.index("a") == 0
    assert recorder.began[-1] == "d"
    assert (0.5, "half way") in recorder.notes


def test_a_second_run_starts_no_process(tmp_path: Path) -> None:
    first, _ = run(diamond(), tmp_path)
    second, recorder = run(diamond(), tmp_path)
    assert recorder.began == []
    assert {r.status for r in second.values()} == {"hit"}
    assert [second[i].artifact for i in second] == [first[i].artifact for i in second]


def test_a_changed_option_runs_that_step_and_those_behind_it_only(tmp_path: Path) -> None:
    run(diamond(), tmp_path)
    changed = plan(step("a"), step("b", ("a",), text="!"), step("c", ("a",)), step("d", ("b", "c")))
    _, recorder = run(changed, tmp_path)
    assert recorder.began == ["b", "d"]


def test_a_step_that_gives_the_same_bytes_leaves_what_follows_a_hit(tmp_path: Path) -> None:
    run(diamond(), tmp_path)
    slower = plan(step("a"), step("b", ("a",), seconds=0.01), step("c", ("a",)), step("d", ("b", "c")))
    _, recorder = run(slower, tmp_path)
    assert recorder.began == ["b"]


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("raise", "ValueError: a plug-in's own bug (fake.py:"),
        ("refuse", "here: it can't be done. Do that instead."),
        ("abort", "ended by SIGABRT"),
        ("killed", "ended by SIGKILL. The machine may be out of memory."),
        ("exit", "exit code 0 and no result"),
        ("nothing", "wrote nothing"),
        ("full", "No space left on device"),
    ],
)
def test_a_step_that_fails_says_how_and_leaves_its_log_and_job(tmp_path: Path, does: str, said: str) -> None:
    results, _ = run(diamond(does=does), tmp_path)
    failed = results["d"]
    assert failed.status == "failed"
    assert said in str(failed.error)
    assert failed.failure is not None
    assert json.loads((failed.failure / "job.json").read_text())["stage"] == "fake"
    if does in ("raise", "refuse"):
        log = (failed.failure / "log.txt").read_text()
        assert "the step's own words" in log
        assert "Traceback" in log


def test_a_step_that_dies_on_a_full_disk_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, _ = run(diamond(does="abort"), tmp_path)
    assert "disk is full" not in str(results["d"].error)
    monkeypatch.setattr("vbpipe.run.process.shutil.disk_usage", lambda _path: SimpleNamespace(free=0))
    results, _ = run(diamond(does="abort"), tmp_path)
    assert "ended by SIGABRT. The store's disk is full" in str(results["d"].error)


def test_a_failed_step_can_be_run_again_from_its_job(tmp_path: Path) -> None:
    results, _ = run(diamond(does="raise"), tmp_path)
    failure = results["d"].failure
    assert failure is not None
    command = [sys.executable, "-m", "vbpipe.cli", "worker", "run", str(failure / "job.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "d: failed again: ValueError: a plug-in's own bug" in done.stdout


def test_a_failure_is_not_cached_and_what_does_not_need_it_goes_on(tmp_path: Path) -> None:
    broken = plan(step("a"), step("b", ("a",), does="raise"), step("c", ("a",)), step("d", ("b",)), step("e", ("c",)))
    results, _ = run(broken, tmp_path)
    assert {i: r.status for i, r in results.items()} == {
        "a": "built", "b": "failed", "c": "built", "d": "skipped", "e": "built",
    }  # fmt: skip
    assert "because b has no result" in str(results["d"].error)
    again, recorder = run(broken, tmp_path)
    assert recorder.began == ["b"]
    assert again["b"].status == "failed"


def test_a_step_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    results, _ = run(plan(step("a", seconds=60)), tmp_path, timeout_s=0.5)
    assert "longer than 0.5 s" in str(results["a"].error)


def test_an_interrupt_kills_the_step_and_keeps_what_had_finished(tmp_path: Path) -> None:
    long = plan(step("a"), step("b", ("a",), seconds=60, diary=str(tmp_path / "diary")))

    def interrupt() -> None:
        while not (tmp_path / "diary").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(Interrupted):
        run(long, tmp_path)
    _, recorder = run(plan(step("a")), tmp_path)
    assert recorder.began == []
    assert list((tmp_path / "store").rglob("tmp/*/*")) == []


BUILD = """
    import sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    import importlib.util
    spec = importlib.util.spec_from_file_location("t", {this!r})
    t = importlib.util.module_from_spec(spec); spec.loader.exec_module(t)
    steps = [t.step(f"s{{i}}", (f"s{{i-1}}",) if i else (), diary={diary!r}, seconds=0.03) for i in range(6)]
    results, _ = t.run(t.plan(*steps), Path({root!r}))
    print(results["s5"].artifact.digest)
"""


def program(root: Path, diary: Path) -> list[str]:
    this = str(Path(__file__))
    text = BUILD.format(tests=str(Path(__file__).parent.parent), this=this, diary=str(diary), root=str(root))
    return [sys.executable, "-c", textwrap.dedent(text)]


def test_killed_builds_lose_only_the_step_they_were_in(tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    want = subprocess.run(program(tmp_path / "reference", tmp_path / "d0"), capture_output=True, text=True, check=True)
    root, diary, random_times = tmp_path / "killed", tmp_path / "diary", random.Random(3)
    root.mkdir()
    for _ in range(20):
        child = subprocess.Popen(program(root, diary), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        time.sleep(random_times.uniform(0.1, 1.2))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        store = Store(root / "store")
        finished = {entry.kind for entry in store.entries()}
        assert store.verify().damaged == ()
        diary.write_text("")
        if len(finished) == 6:
            break
        got = subprocess.Popen(program(root, diary), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        time.sleep(random_times.uniform(0.1, 1.2))
        got.send_signal(signal.SIGKILL)
        got.communicate()
        assert finished.isdisjoint(diary.read_text().split())
    last = subprocess.run(program(root, diary), capture_output=True, text=True, check=True)
    assert last.stdout == want.stdout
    assert Store(root / "store").verify().damaged == ()


def test_two_builds_at_once_do_each_step_once_and_agree(tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    both = [subprocess.Popen(program(tmp_path, diary), stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0] for process in both]
    assert outputs[0] == outputs[1] != ""
    assert sorted(diary.read_text().split()) == [f"s{i}" for i in range(6)]


def test_a_killed_build_leaves_no_process_behind(tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    text = " ".join(program(tmp_path, diary)[2:]).replace("seconds=0.03", "seconds=30")
    child = subprocess.Popen([sys.executable, "-c", text])
    while not diary.exists():
        time.sleep(0.01)
    worker = int(subprocess.run(["pgrep", "-P", str(child.pid)], capture_output=True, text=True, check=True).stdout)
    child.send_signal(signal.SIGKILL)
    child.wait()
    for _ in range(200):
        if not Path(f"/proc/{worker}").exists() or "Z" in Path(f"/proc/{worker}/stat").read_text().split()[2]:
            return
        time.sleep(0.01)
    raise AssertionError("the worker still runs")


def test_an_interrupt_ends_a_build_that_waits_for_another(tmp_path: Path) -> None:
    from vbpipe.core import cache_key

    waiting = plan(step("a"))
    key = cache_key(waiting.steps["a"].stage, {}, tmp_path)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with Store(tmp_path / "store").locked(key):
            held.set()
            release.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(10)
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(Interrupted):
            run(waiting, tmp_path)
        assert not release.is_set()
    finally:
        release.set()
        holder.join()


def test_a_process_that_can_not_be_started_ends_its_step_and_not_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("vbpipe.run.process.subprocess.Popen", refuse)
    results, _ = run(plan(step("a"), step("b", ("a",))), tmp_path)
    assert results["a"].status == "failed"
    assert "could not be started: Resource temporarily unavailable" in str(results["a"].error)
    assert results["b"].status == "skipped"
    assert len(list(Path("/proc/self/fd").iterdir())) < 60


def test_a_file_in_the_users_folder_does_not_stand_in_for_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pydantic.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    results, _ = run(plan(step("a")), tmp_path)
    assert results["a"].status == "built"


def test_what_a_crashed_step_had_started_is_ended_with_it(tmp_path: Path) -> None:
    results, _ = run(plan(step("a", does="orphan", diary=str(tmp_path / "pid"))), tmp_path)
    assert results["a"].status == "failed"
    child = int((tmp_path / "pid").read_text().splitlines()[-1])
    for _ in range(200):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.01)
    raise AssertionError("the child still runs")
