"""Show a running plan: a live view on a terminal, one line per event elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from vbpipe.plan import Plan, Step
from vbpipe.run.executor import Reporter, StepResult
from vbpipe.store import Holder

_QUIET_S = 10.0
"""Off a terminal, a long step says so this often."""


@contextmanager
def reporter(console: Console, plan: Plan) -> Iterator[Reporter]:
    """Yield the reporter that fits the console, and clean the screen up behind it."""
    if not console.is_terminal:
        yield LineReporter(console, len(plan.steps))
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield LiveReporter(LineReporter(console, len(plan.steps)), progress)


@contextmanager
def bench_view(console: Console) -> Iterator[Callable[[float | None, str], None]]:
    """Yield a progress callback for a measurement: a bar on a terminal, a line every ten seconds elsewhere."""
    if not console.is_terminal:
        last = [time.monotonic()]

        def line(fraction: float | None, message: str) -> None:
            if time.monotonic() - last[0] >= _QUIET_S:
                last[0] = time.monotonic()
                console.print(Text(f"{fraction or 0:.0%} {message}"), soft_wrap=True)

        yield line
        return
    with Progress(BarColumn(bar_width=20), TextColumn("{task.description}", markup=False), console=console) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda fraction, message: bar.update(task, completed=fraction or 0.0, description=message)


def title(step: Step) -> str:
    """Return what a person calls a step: its label, and the variant and target where only one uses it."""
    if len(step.identities) == 1:
        _recipe, variant, target, *rest = step.identities[0].split("/")
        where = target if variant == "*" else f"{variant}/{target}"
        return f"{'/'.join(rest)} ({where})"
    _recipe, _variant, _target, *rest = step.identities[0].split("/")
    return f"{'/'.join(rest)} (shared by {len(step.identities)})"


@dataclass
class LineReporter:
    """One line when a step ends, and now and then while a long one runs."""

    console: Console
    total: int
    done: int = 0
    _spoke: dict[str, float] = field(default_factory=dict)

    def started(self, step: Step) -> None:
        self._spoke[step.id] = time.monotonic()

    def progress(self, step: Step, fraction: float | None, message: str) -> None:
        now = time.monotonic()
        if now - self._spoke.get(step.id, now) >= _QUIET_S:
            self._spoke[step.id] = now
            share = f"{fraction:.0%} " if fraction is not None else ""
            self._say(f"    … {title(step)}: {share}{message}")

    def waiting(self, step: Step, holder: Holder) -> None:
        whom = f"process {holder.pid}" if holder.pid else "another process"
        self._say(f"    … {title(step)}: waiting for {whom}")

    def finished(self, result: StepResult) -> None:
        self.done += 1
        if result.status == "skipped":
            return  # what it waited for has been told
        word = {"hit": "in store", "built": "built", "failed": "FAILED", "skipped": "skipped"}[result.status]
        seconds = f" {result.seconds:.1f} s" if result.status == "built" else ""
        self._say(f"[{self.done:>3}/{self.total}] {word:<8} {title(result.step)}{seconds}")
        if result.artifact is not None and result.status == "built":
            self._notes(result)
        if result.error is not None and result.status == "failed":
            self._say(f"          {result.error}", style="red")
            if result.failure is not None:
                self._say(f"          log: {result.failure / 'log.txt'}")
                self._say(f"          again: vbpipe worker run {result.failure / 'job.json'}")

    def warn(self, message: str) -> None:
        self._say(f"warning: {message}", style="yellow")

    def _notes(self, result: StepResult) -> None:
        assert result.artifact is not None
        meta = result.artifact.meta
        if meta.get("effect") == "none":
            self._say("          changed nothing", style="yellow")
        if meta.get("note"):
            self._say(f"          {meta['note']}", style="dim")
        if meta.get("warning"):
            self._say(f"          {meta['warning']}", style="yellow")
        if meta.get("fallback_reason"):
            self._say(f"          fell back to the {meta.get('exporter')} exporter: {meta['fallback_reason']}")

    def _say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style), soft_wrap=True)


@dataclass
class LiveReporter:
    """A bar per running step above the lines of those that ended."""

    lines: LineReporter
    bars: Progress
    _tasks: dict[str, TaskID] = field(default_factory=dict)

    def started(self, step: Step) -> None:
        self._tasks[step.id] = self.bars.add_task(title(step), total=None, note="")

    def progress(self, step: Step, fraction: float | None, message: str) -> None:
        task = self._tasks.get(step.id)
        if task is not None:
            total, completed = (None, 0.0) if fraction is None else (1.0, fraction)
            self.bars.update(task, total=total, completed=completed, note=message[:100])

    def waiting(self, step: Step, holder: Holder) -> None:
        self.lines.waiting(step, holder)

    def finished(self, result: StepResult) -> None:
        task = self._tasks.pop(result.step.id, None)
        if task is not None:
            self.bars.remove_task(task)
        self.lines.finished(result)

    def warn(self, message: str) -> None:
        self.lines.warn(message)
