"""Everything that vbpipe raises on purpose: what went wrong, where, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


class VbpipeError(Exception):
    """An error with a message for a person.

    Args:
        what: one sentence that names what is wrong.
        where: a file, a step or a recipe path; empty when there is none.
        hint: what to do next; empty when `what` already says it.
    """

    exit_code: ClassVar[int] = 3

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        if self.hint and head and head[-1] not in ".!?:;":
            head += "."
        return f"{head} {self.hint}".strip()


class UsageError(VbpipeError):
    """The command line, a file it names or a plug-in's name is wrong."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a recipe. `line` and `column` count from 1; 0 means unknown."""

    file: str
    line: int
    column: int
    path: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{place}: {self.path}: {self.message}" if self.path else f"{place}: {self.message}"


class RecipeError(VbpipeError):
    """A recipe that can't be used; carries every problem found, in the order of the file."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class StepFailed(VbpipeError):
    """A step of the plan did not produce its artifact."""


class StoreError(VbpipeError):
    """The store can't be read or written."""


class StoreDamaged(StoreError):
    """An entry's bytes are not those that were stored; treated as a miss by a build."""


class EngineError(VbpipeError):
    """An engine can't be opened, or refuses its inputs."""


class BundleError(VbpipeError):
    """A bundle is incomplete, changed since it was packaged, or does not fit this host."""


class Interrupted(VbpipeError):
    """Ctrl-C or SIGTERM; everything finished so far is in the store."""

    exit_code = 130
