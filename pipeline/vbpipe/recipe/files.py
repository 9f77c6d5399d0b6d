"""Check, without importing anything, the files and functions that a recipe names."""

from __future__ import annotations

import ast
import importlib.util
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vbpipe.errors import Problem
from vbpipe.recipe.document import Node, child, items, locate, quote
from vbpipe.recipe.references import is_file, split
from vbpipe.recipe.stored import check_stored
from vbpipe.recipe.wording import suggest

MAX_SEARCHED = 2000
"""Files looked at for a near name, so that a recipe at the top of a disk is still answered at once."""

_REFERENCES = (("model", "factory"), ("data", "calibration"), ("data", "evaluation"))


@dataclass(frozen=True)
class Defined:
    """The names at the top level of a Python file; `open_ended` where it may define others too."""

    names: frozenset[str]
    open_ended: bool


@dataclass
class SourceFiles:
    """The files beside one recipe; each is read once, however many variants name it."""

    folder: Path
    """The recipe's folder, as the user wrote it."""
    allow_outside: bool
    _read: dict[Path, Defined | Problem] = field(default_factory=dict)

    def check(self, root: Node) -> Iterator[Problem]:
        """Yield every file that is outside or missing, broken Python, missing function and unfit stored report."""
        for steps in _REFERENCES:
            node = locate(root, *steps)
            if node is not None and isinstance(node.value, str) and ":" in node.value:
                yield from self._reference(node, node.value)
        for node in items(locate(root, "model", "files")):
            wrong = self._wrong_file(node.value) if isinstance(node.value, str) else None
            if wrong:
                yield node.place.problem(wrong)
        for gate in items(child(root, "gates")):
            report = locate(gate, "over", "report")
            if report is not None and isinstance(report.value, str):
                yield from self._stored(report, report.value, gate, root)

    def _stored(self, node: Node, name: str, gate: Node, root: Node) -> Iterator[Problem]:
        wrong = self._wrong_file(name)
        if wrong:
            yield node.place.problem(wrong)
        else:
            yield from check_stored(node, self.folder / name, gate, root)

    def _reference(self, node: Node, reference: str) -> Iterator[Problem]:
        target, function = split(reference)
        if not is_file(target):
            yield from self._module(node, target)
            return
        wrong = self._wrong_file(target)
        if wrong:
            yield node.place.problem(wrong)
            return
        path = self.folder / target
        if path not in self._read:
            self._read[path] = _defined(path)
        found = self._read[path]
        if isinstance(found, Problem):
            yield found
        elif function not in found.names and not found.open_ended:
            yield node.place.problem(f"{target} defines no {quote(function)}.{suggest(function, found.names)}")

    def _module(self, node: Node, module: str) -> Iterator[Problem]:
        parts = module.split(".")
        if not all(part.isidentifier() for part in parts) or parts[0] == "__main__":
            yield node.place.problem(f"{quote(module)} is neither a .py file nor a module's name.")
        elif importlib.util.find_spec(parts[0]) is None:
            beside = Path(*parts).with_suffix(".py")
            hint = f" Did you mean {quote(beside.as_posix())}?" if (self.folder / beside).is_file() else " Install it."
            yield node.place.problem(f"no module {quote(parts[0])} is installed here.{hint}")

    def _wrong_file(self, name: str) -> str | None:
        try:
            path = (self.folder / name).resolve()
            inside = path.is_relative_to(self.folder.resolve()) and not Path(name).is_absolute()
            if not inside and not self.allow_outside:
                return f"{quote(name)} leads out of the recipe's folder. Move it in there, or pass --allow-outside."
            return None if stat.S_ISREG(path.stat().st_mode) else f"{quote(name)} is not a regular file."
        except FileNotFoundError:
            return f"no file {quote(name)} beside the recipe.{self._near(name)}"
        except (OSError, RuntimeError, ValueError) as error:
            # A loop of links is a RuntimeError up to Python 3.12.
            return f"{quote(name)} can't be read: {getattr(error, 'strerror', None) or error}."

    def _near(self, name: str) -> str:
        there: dict[str, str] = {}
        for parent, folders, files in os.walk(self.folder):
            folders[:] = sorted(folder for folder in folders if not folder.startswith((".", "__")))
            below = Path(parent).relative_to(self.folder)
            there |= {(below / file).as_posix(): file for file in sorted(files)}
            if len(there) > MAX_SEARCHED:
                break
        same_name = next((path for path, file in there.items() if file == Path(name).name), None)
        return f" Did you mean {quote(same_name)}?" if same_name else suggest(name, there)


def _defined(path: Path) -> Defined | Problem:
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        return Problem(str(path), error.lineno or 0, error.offset or 0, "", f"not valid Python: {error.msg}.")
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        return Problem(str(path), 0, 0, "", f"can't be read as Python: {error}.")
    names: set[str] = set()
    for statement in _top_level(tree.body):
        names |= _bound(statement)
    return Defined(frozenset(names - {"*", "__getattr__"}), bool(names & {"*", "__getattr__"}))


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With | ast.For | ast.While):
            for name in ("body", "orelse", "finalbody"):
                yield from _top_level(getattr(statement, name, []))
            for handler in getattr(statement, "handlers", []):
                yield from _top_level(handler.body)


def _bound(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return {
            node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
    return set()
