"""Import the functions that a recipe names, and name the sources and packages that they depend on."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from vbpipe.errors import UsageError, VbpipeError
from vbpipe.recipe.wording import suggest

_MARK = "__vbpipe_root__"
"""Set on every module imported from a recipe's folder, so that another recipe's module of that name can follow."""

_PRIVATE = "_vbpipe_recipe_"


def split(reference: str) -> tuple[str, str]:
    """Return the file or module, and the function."""
    target, _, function = reference.rpartition(":")
    return target, function


def is_file(target: str) -> bool:
    """Return whether the first part of a reference is a file beside the recipe, not a module."""
    return target.endswith(".py") or "/" in target


def resolve(reference: str, root: Path) -> Callable[..., Any]:
    """Import and return the function that a reference names. This runs the recipe's code.

    A file is imported under a private name, and may import modules beside it and in the recipe's folder while it is
    being imported; relative imports (`from .layers import Block`) work at any time.

    Args:
        reference: "models/minilm.py:build" or "package.module:function".
        root: the recipe's folder.

    Raises:
        UsageError: no such file, module or function, or it isn't callable.
        VbpipeError: the code failed while it was imported; says at which of its lines.
    """
    target, function = split(reference)
    with _importing(reference, root):
        module = _import_file(root / target, root, reference) if is_file(target) else importlib.import_module(target)
        found = getattr(module, function, None)
    if found is None and not hasattr(module, function):
        there = [name for name, value in vars(module).items() if callable(value)]
        raise UsageError(f"{target} has no {function!r}.{suggest(function, there)}", where=reference)
    if not callable(found):
        raise UsageError(f"{function!r} is a {type(found).__name__}, not a function.", where=reference)
    return found  # type: ignore[no-any-return]  # a user's function can be anything callable


def source_digests(
    reference: str, root: Path, files: Sequence[str] = (), packages: Sequence[str] = ()
) -> Mapping[str, str]:
    """Return what the function's behaviour depends on, found without importing anything.

    "source.models/minilm.py": sha256 of the file, and of every module of the recipe's folder that it imports, directly
    or not; "package.torch": version of every distribution that those files import ("absent" where it isn't installed).
    For a module's function: of its file and of the modules of its package, unless it is installed in site-packages,
    where the version tells as much. Imports by computed names aren't seen; `files` and `packages` name those.

    Args:
        reference: "models/minilm.py:build" or "package.module:function".
        root: the recipe's folder.
        files: more files that it reads, as "file.weights.bin": sha256.
        packages: more distributions that it uses.

    Raises:
        UsageError: there is no such file or module.
    """
    found = {**_code_digests(reference, root), **_named_versions(packages)}
    for name in files:
        path = root / name
        if not path.is_file():
            raise _no_file(name, root, "model.files")
        with path.open("rb") as file:
            found[f"file.{name}"] = _sha256_of(file)
    return found


@contextmanager
def _importing(reference: str, root: Path) -> Iterator[None]:
    """Let the recipe's modules be found, mark those that were, and word what goes wrong."""
    target, _ = split(reference)
    folders = [str((root / target).parent), str(root)] if is_file(target) else []
    before, path = set(sys.modules), list(sys.path)
    if folders:
        _forget_namesakes(folders)
    sys.path[:0] = folders
    try:
        yield
    except VbpipeError:
        raise
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        raise VbpipeError(_failure(error), where=_line_of(error, root) or reference, hint=_what_next(error)) from error
    finally:
        sys.path[:] = path
        for name in sys.modules.keys() - before:
            if _belongs_to(sys.modules[name], folders):
                setattr(sys.modules[name], _MARK, True)


def _forget_namesakes(folders: Sequence[str]) -> None:
    """Drop modules of another recipe, and those that would now be found elsewhere: they would shadow our files."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_PRIVATE) or _MARK not in vars(module):
            continue
        ours = next((files[-1] for folder in folders if (files := _local_files(name.split("."), Path(folder)))), None)
        if not _belongs_to(module, folders) or (ours is not None and not ours.samefile(str(module.__file__))):
            del sys.modules[name]


def _belongs_to(module: ModuleType, folders: Sequence[str]) -> bool:
    file = getattr(module, "__file__", None)
    return (
        isinstance(file, str) and not _is_installed(Path(file)) and any(Path(file).is_relative_to(f) for f in folders)
    )


def _import_file(path: Path, root: Path, reference: str) -> ModuleType:
    if not path.is_file():
        raise _no_file(split(reference)[0], root, reference)
    # Named by content and by place below the recipe, never by the machine's own paths: exporters write class names into
    # their files. The functions of one file share a module, a changed file gets a new one. The package around it exists
    # so that relative imports find the files beside it.
    place = Path(os.path.relpath(path.resolve(), root.resolve())).as_posix()
    digest = _sha256(place.encode() + b"\0" + path.read_bytes())[:16]
    package = ModuleType(f"{_PRIVATE}{digest}")
    package.__path__ = [str(path.parent)]
    name = f"{package.__name__}.{re.sub('[^A-Za-z0-9_]', '_', path.stem)}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path):
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError("not a Python file.", where=reference, hint="Its name has to end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[package.__name__] = package
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _no_file(target: str, root: Path, reference: str) -> UsageError:
    folder = (root / target).parent
    there = [child.name for child in folder.iterdir()] if folder.is_dir() else []
    return UsageError(f"no file {target!r} in {root}.{suggest(Path(target).name, there)}", where=reference)


def _failure(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "the file ends the program while it is imported (SystemExit)."
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"importing it failed: {type(error).__name__}: {message}."


def _line_of(error: BaseException, root: Path) -> str:
    """Return "file:line" of the last line of the recipe's own code that was running."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if _is_below(Path(f.filename), root) and not _is_installed(Path(f.filename))]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def _what_next(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"Install {error.name!r}, or put it beside the recipe."
    return "Correct the file, or run it with Python to see more."


def _code_digests(reference: str, root: Path) -> dict[str, str]:
    target, _ = split(reference)
    if is_file(target):
        path = root / target
        if not path.is_file():
            raise _no_file(target, root, reference)
        return _digests([path], (path.parent, root), root)
    path = _module_file(target, reference)
    if _is_installed(path):
        return {f"source.{target}": _sha256(path.read_bytes()), **_versions({target.split(".")[0]})}
    above = path.parents[target.count(".") + (path.name == "__init__.py")]
    return _digests(_local_files(target.split("."), above), (above,), above)


def _digests(entries: Sequence[Path], folders: Sequence[Path], root: Path) -> dict[str, str]:
    """Scan `entries` and, through their imports, the files below `root`; `folders` is where absolute imports start."""
    sources: dict[str, str] = {}
    outside: set[str] = set()
    pending = list(entries)
    while pending:
        path = pending.pop()
        key = f"source.{Path(os.path.relpath(path, root)).as_posix()}"
        if key in sources:
            continue
        text = path.read_bytes()
        sources[key] = _sha256(text)
        for module, bases in _imports(text, path, folders):
            local = [file for base in bases for file in _local_files(module, base) if _is_below(file, root)]
            pending += local
            if not local and bases is folders and module:
                outside.add(module[0])
    third_party = {top for top in outside if top not in sys.stdlib_module_names}
    return {**dict(sorted(sources.items())), **_versions(third_party)}


def _imports(text: bytes, path: Path, folders: Sequence[Path]) -> Iterator[tuple[Sequence[str], Sequence[Path]]]:
    """Yield (parts of the module's name, folders that it may be below) of every import, wherever in the file."""
    for level, parts in _import_statements(text):
        yield parts, (path.parents[level - 1],) if level else folders


@cache
def _import_statements(text: bytes) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Return (level, parts of the module's name) of every import in a source; cached, as many steps share a file."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        # Importing it will say so; its bytes are in the digest.
        return ()
    found: list[tuple[int, tuple[str, ...]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(0, tuple(alias.name.split("."))) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = tuple(node.module.split(".")) if node.module else ()
            # `from a import b`: b may be a module.
            found += [(node.level, (*parts, alias.name)) for alias in node.names]
    return tuple(found)


def _local_files(parts: Sequence[str], base: Path) -> list[Path]:
    """Return the files that importing `parts` from `base` runs: packages' __init__.py on the way, then the module."""
    found: list[Path] = []
    for count in range(1, len(parts) + 1):
        stem = base.joinpath(*parts[:count])
        both = (stem / "__init__.py", stem.with_name(f"{stem.name}.py"))
        found += [file for file in both if file.is_file()][:1]
    return found


def _is_below(file: Path, root: Path) -> bool:
    return file.resolve().is_relative_to(root.resolve())


def _module_file(name: str, reference: str) -> Path:
    """Find a module's file by its parents' paths, because find_spec of "a.b" would import a."""
    parts = name.split(".")
    spec = importlib.util.find_spec(parts[0]) if all(parts) and parts[0] != "__main__" else None
    for count in range(2, len(parts) + 1):
        if spec is None or spec.submodule_search_locations is None:
            break
        spec = PathFinder.find_spec(".".join(parts[:count]), list(spec.submodule_search_locations))
    else:
        if spec is not None and spec.origin and spec.has_location:
            return Path(spec.origin)
    raise UsageError(f"there is no module {name!r} here.", where=reference, hint="Install it, or correct its name.")


@cache
def _is_installed(path: Path) -> bool:
    return any(path.is_relative_to(sysconfig.get_path(kind)) for kind in ("purelib", "platlib", "stdlib"))


def _versions(modules: set[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for module in modules:
        for name, number in _distributions_of(module):
            found[f"package.{name}"] = number
    return dict(sorted(found.items()))


def _named_versions(packages: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in packages:
        try:
            found[f"package.{name}"] = version(name)
        except PackageNotFoundError:
            found[f"package.{name}"] = "absent"
    return found


@cache
def _distributions_of(module: str) -> tuple[tuple[str, str], ...]:
    """Return (name, version) of the distributions that bring a top-level module; most are called as it is."""
    try:
        return ((module, version(module)),)
    except PackageNotFoundError:
        pass
    found = {(d.metadata["Name"], d.version) for d in distributions() if module in _top_levels(d)}
    return tuple(sorted(found)) or ((module, "absent"),)


def _top_levels(distribution: Distribution) -> set[str]:
    listed = distribution.read_text("top_level.txt")
    if listed is not None:
        return set(listed.split())
    record = distribution.read_text("RECORD") or ""
    return {re.split(r"[/.,]", line, maxsplit=1)[0] for line in record.splitlines()}


def _sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _sha256_of(file: BinaryIO) -> str:
    """hashlib.file_digest, which Python 3.10 lacks."""
    digest = hashlib.sha256()
    while block := file.read(2**20):
        digest.update(block)
    return digest.hexdigest()
