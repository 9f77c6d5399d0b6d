"""Run a plan's steps in dependency order, several at a time, taking from the store what is already there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from vbpipe.core import Artifact, CacheKey, cache_key
from vbpipe.errors import Interrupted, StepFailed, StoreError, VbpipeError
from vbpipe.plan import Plan, Step
from vbpipe.run.job import Job
from vbpipe.run.process import StepProcess
from vbpipe.store import Holder, Store

Status = Literal["hit", "built", "failed", "skipped"]


@dataclass(frozen=True)
class StepResult:
    """How a step ended. `failure` is the folder with its log and job, when it failed in its own process."""

    step: Step
    status: Status
    artifact: Artifact | None = None
    key: CacheKey | None = None
    seconds: float = 0.0
    error: VbpipeError | None = None
    failure: Path | None = None


class Reporter(Protocol):
    """What is told while a plan runs. Called from several threads, one call at a time."""

    def started(self, step: Step) -> None: ...
    def progress(self, step: Step, fraction: float | None, message: str) -> None: ...
    def waiting(self, step: Step, holder: Holder) -> None: ...
    def finished(self, result: StepResult) -> None: ...
    def warn(self, message: str) -> None: ...


@dataclass(frozen=True)
class RunSettings:
    """How a plan is run; none of it changes what the steps make.

    Args:
        root: the recipe's folder.
        jobs: steps at a time.
        threads: of each step's process.
        timeout_s: a step that takes longer is stopped and has failed; None sets no limit.
    """

    root: Path
    jobs: int = 1
    threads: int = 1
    timeout_s: float | None = None


def execute(plan: Plan, store: Store, settings: RunSettings, reporter: Reporter) -> Mapping[str, StepResult]:
    """Run every step of the plan that is not in the store, and return each step's result by its id.

    A step that fails stops only those that need it; variants and targets beside it go on.

    Raises:
        Interrupted: Ctrl-C; what had finished is in the store.
        StoreError: the store can't be used at all.
    """
    return _Run(plan, store, settings, _OneAtATime(reporter)).run()


@dataclass
class _Run:
    plan: Plan
    store: Store
    settings: RunSettings
    reporter: Reporter
    stop: threading.Event = field(default_factory=threading.Event)
    results: dict[str, StepResult] = field(default_factory=dict)

    def run(self) -> Mapping[str, StepResult]:
        pending = dict(self.plan.steps)
        running: dict[Future[StepResult], str] = {}
        with ThreadPoolExecutor(self.settings.jobs, thread_name_prefix="step") as pool:
            try:
                while pending or running:
                    self._submit_ready(pending, running, pool)
                    done, _ = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
                    for future in done:
                        step_id = running.pop(future)
                        self.results[step_id] = future.result()
                        self.reporter.finished(self.results[step_id])
            except BaseException as error:
                self.stop.set()  # the children are killed before the pool is left
                pool.shutdown(wait=False, cancel_futures=True)
                if isinstance(error, KeyboardInterrupt):
                    raise Interrupted(
                        "interrupted.", hint="What had finished is kept: the same command goes on from there."
                    ) from error
                raise
        return self.results

    def _submit_ready(
        self, pending: dict[str, Step], running: dict[Future[StepResult], str], pool: ThreadPoolExecutor
    ) -> None:
        for step_id, step in list(pending.items()):
            if not set(step.needs.values()) <= self.results.keys():
                continue
            del pending[step_id]
            inputs, lacking = self._inputs(step)
            if lacking:
                error = StepFailed(f"skipped, because {lacking} has no result.")
                self.results[step_id] = StepResult(step, "skipped", error=error)
                self.reporter.finished(self.results[step_id])
            else:
                running[pool.submit(self._one, step, inputs)] = step_id

    def _inputs(self, step: Step) -> tuple[dict[str, Artifact], str]:
        """Return what a step reads, and the label of the first thing that it can't do without and that failed."""
        found: dict[str, Artifact] = {}
        for name, step_id in step.needs.items():
            artifact = self.results[step_id].artifact
            if artifact is not None:
                found[name] = artifact
            elif step.stage.scope != "target" or name in _ALWAYS_NEEDED:
                return found, self.results[step_id].step.label
        return found, ""

    def _one(self, step: Step, inputs: Mapping[str, Artifact]) -> StepResult:
        began = time.monotonic()
        key: CacheKey | None = None
        try:
            key = cache_key(step.stage, {n: a.digest for n, a in inputs.items()}, self.settings.root)
            hit = self.store.get(key, *step.identities)
            if hit is not None:
                return StepResult(step, "hit", hit, key, time.monotonic() - began)
            with self.store.locked(key, lambda holder: self.reporter.waiting(step, holder), self.stop.is_set):
                # Whoever held the lock may have made it meanwhile.
                hit = self.store.get(key, *step.identities)
                if hit is not None:
                    return StepResult(step, "hit", hit, key, time.monotonic() - began)
                return self._make(step, key, inputs)
        except Interrupted as error:
            return StepResult(step, "skipped", key=key, error=error)
        except VbpipeError as error:
            return StepResult(step, "failed", key=key, seconds=time.monotonic() - began, error=error)
        except OSError as error:
            # Starting a process takes memory, pipes and disk; what lacks ends this step, not the build.
            failed = StepFailed(f"it could not be started: {error.strerror or error}.", where=str(error.filename or ""))
            return StepResult(step, "failed", key=key, seconds=time.monotonic() - began, error=failed)

    def _make(self, step: Step, key: CacheKey, inputs: Mapping[str, Artifact]) -> StepResult:
        alone = bool(getattr(step.stage, "exclusive", False))
        with (
            self.store.host_lock(
                exclusive=alone, on_wait=lambda holder: self.reporter.waiting(step, holder), give_up=self.stop.is_set
            ),
            self.store.workspace() as scratch,
        ):
            self.reporter.started(step)
            began = time.monotonic()
            out = scratch / "out"
            out.mkdir()
            job = Job.of(step, inputs, out, self.settings.root, self.settings.threads)
            process = StepProcess(job, scratch, self.settings.timeout_s, self.stop)
            try:
                meta = process.run(lambda fraction, text: self.reporter.progress(step, fraction, text))
            except VbpipeError as error:
                if self.stop.is_set():
                    return StepResult(step, "skipped", key=key, error=error)
                kept = self._keep_failure(key, process.log, job)
                return StepResult(step, "failed", key=key, seconds=time.monotonic() - began, error=error, failure=kept)
            seconds = time.monotonic() - began
            artifact = self.store.put(
                key, *step.identities, kind=step.stage.produces(), source_dir=out, meta=meta, seconds=seconds
            )
        return StepResult(step, "built", artifact, key, seconds)

    def _keep_failure(self, key: CacheKey, log: Path, job: Job) -> Path | None:
        try:
            return self.store.fail(key, log, {**job.to_json(), "out": ""})
        except StoreError as error:
            # A full disk is often why the step failed: its own error is the one to show.
            self.reporter.warn(str(error))
            return None


_ALWAYS_NEEDED = frozenset({"eager", "samples", "measurement", "verdict"})
"""Inputs that no target-wide step can do without; it does without any other that failed."""


class _OneAtATime:
    """Passes calls on to a reporter, never two at once."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._lock = threading.Lock()

    @contextmanager
    def _alone(self) -> Iterator[Reporter]:
        with self._lock:
            yield self._reporter

    def started(self, step: Step) -> None:
        with self._alone() as reporter:
            reporter.started(step)

    def progress(self, step: Step, fraction: float | None, message: str) -> None:
        with self._alone() as reporter:
            reporter.progress(step, fraction, message)

    def waiting(self, step: Step, holder: Holder) -> None:
        with self._alone() as reporter:
            reporter.waiting(step, holder)

    def finished(self, result: StepResult) -> None:
        with self._alone() as reporter:
            reporter.finished(result)

    def warn(self, message: str) -> None:
        with self._alone() as reporter:
            reporter.warn(message)
