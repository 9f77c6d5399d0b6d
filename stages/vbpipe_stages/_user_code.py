"""Call code that a recipe names: what its results depend on, and which of its lines is at fault when it fails."""

from __future__ import annotations

import random
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vbpipe.errors import VbpipeError
from vbpipe.recipe.model import Model
from vbpipe.recipe.references import source_digests


@contextmanager
def blame(what: str, root: Path, *, where: str = "", hint: str = "") -> Iterator[None]:
    """Turn anything raised inside into a VbpipeError that names the user's file and line.

    Args:
        what: who raised it: "model.factory models/tiny.py:build".
        root: the recipe's folder; the innermost frame in a file under it is the one to name.
        where: used where no frame lies in the user's files.
    """
    try:
        yield
    except VbpipeError as error:
        error.where = error.where or location(error, root)
        raise
    except (Exception, SystemExit) as error:
        place = location(error, root) or where
        raise VbpipeError(f"{what} raised {brief(error)}", where=place, hint=hint) from error


def dependencies(reference: str, model: Model, root: Path) -> Mapping[str, str]:
    """Return what a function's results depend on: sources and packages, and those that `model` names besides.

    Raises:
        UsageError: a source or a file that the recipe names does not exist.
    """
    return source_digests(reference, root, model.files, model.packages)


def installed(distribution: str) -> str:
    """Return a distribution's version without importing it; "absent" where there is none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"


def seed() -> None:
    """Seed the global random generators, so that user code that draws from them gives the same each time."""
    import numpy as np

    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:  # importing it only to seed it would cost a second
        sys.modules["torch"].manual_seed(0)


def brief(error: BaseException, limit: int = 300) -> str:
    """Return "Type: first lines of the message" in at most about `limit` characters, ending in a stop."""
    text = " ".join(_COLOUR.sub("", str(error)).split())
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    name = type(error).__name__
    return f"{name}: {text.rstrip('.')}." if text else f"{name}."


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def location(error: BaseException, root: Path) -> str:
    """Return "models/tiny.py:12", the innermost line under `root` that `error` passed through, or ""."""
    folder = root.resolve()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename).resolve()
        if path.is_relative_to(folder) and "site-packages" not in path.parts:
            return f"{path.relative_to(folder)}:{frame.lineno}"
    return ""
