"""Bundles: a plain directory with an engine, its manifest and golden samples."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from vbpipe import fidelity, samples
from vbpipe.core import Run, Spec
from vbpipe.errors import BundleError
from vbpipe.fidelity import Fidelity
from vbpipe.runner import Runner, open_runner

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

MANIFEST = "vbpipe.manifest.json"


def _inside(path: str) -> str:
    parts = path.split("/")
    if not path or "\\" in path or "\x00" in path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{path!r} is no plain path inside the bundle")
    return path


RelativePath = Annotated[str, AfterValidator(_inside)]
"""A path below the bundle's directory, with forward slashes."""


class FileFacts(Spec):
    """One file of the bundle. `sha256` is hex; `size` in bytes."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    size: Annotated[int, Field(ge=0)]


class Golden(Spec):
    """Samples to answer before going live: what went in and what this engine gave where it was measured."""

    inputs: RelativePath
    outputs: RelativePath
    cosine_min: float = 0.999
    sqnr_db_min: float = 20.0
    """Answers further from the golden ones than these are refused; the same processor gives equal ones."""


class Claim(Spec):
    """What was measured when the bundle was made; ratios are eager's time over this engine's, with a 95 % interval."""

    ratios: Mapping[str, Mapping[str, float]] = {}
    """Scenario to {value, low, high}."""
    metrics: Mapping[str, float] = {}
    verdict: str = ""
    host: Mapping[str, str] = {}


class Manifest(Spec):
    """Everything that a server must know about a bundle. Version 1."""

    manifest: Literal[1]
    name: str
    version: Annotated[int, Field(ge=1)] = 1
    variant: str
    target: str
    row: str
    """The step that was packaged: "int8/build"."""
    kind: str
    runner: Runner
    engine: RelativePath
    """The engine's directory inside the bundle."""
    golden: Golden
    claim: Claim
    tools: Mapping[str, str] = {}
    files: Mapping[RelativePath, FileFacts]


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. Call `run` with named arrays."""

    path: Path
    manifest: Manifest
    run: Run

    def check_golden(self) -> Fidelity:
        """Answer the golden samples and return how close the answers are to the packaged ones.

        Raises:
            BundleError: an answer is broken, or further off than the manifest allows.
        """
        golden = self.manifest.golden
        expected = samples.load(self.path / golden.outputs)
        answers = []
        for index, sample in enumerate(samples.load(self.path / golden.inputs)):
            answer = self.run(sample)
            problem = fidelity.broken(answer, expected[index])
            if problem:
                raise BundleError(f"golden sample {index}: {problem}.", where=str(self.path), hint="Do not serve it.")
            answers.append({name: answer[name] for name in expected[index]})
        found = fidelity.compare(answers, expected)
        if not (found.cosine_min >= golden.cosine_min and found.sqnr_db >= golden.sqnr_db_min):
            raise BundleError(
                f"golden outputs differ: cosine {found.cosine_min:.6f} (at least {golden.cosine_min} is required), "
                f"SQNR {found.sqnr_db:.1f} dB (at least {golden.sqnr_db_min:g}).",
                where=str(self.path),
                hint="This host computes something else than the one that built it; build for this host.",
            )
        return found


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the bundle directory `path`; raises BundleError when there is none that can be read."""
    file = path / MANIFEST
    try:
        return Manifest.model_validate_json(file.read_bytes())
    except OSError as error:
        raise BundleError(
            f"it is no bundle: {error.strerror or error}.", where=str(file), hint="`vbpipe build` makes bundles."
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise BundleError(f"the manifest is damaged: {place}: {first['msg']}.", where=str(file)) from error


def check_files(path: Path, manifest: Manifest) -> None:
    """Raise BundleError unless the directory holds exactly the manifest's files with their bytes, and no links."""
    there = {MANIFEST: None, **dict.fromkeys(manifest.files)}
    for folder, folders, files in os.walk(path, followlinks=False):
        for name in (*folders, *files):
            entry = Path(folder) / name
            relative = entry.relative_to(path).as_posix()
            if entry.is_symlink():
                raise BundleError("it holds a link.", where=str(entry), hint="Bundles are plain files; fetch it again.")
            if not entry.is_dir() and relative not in there:
                raise BundleError("the manifest does not list this file.", where=str(entry), hint="Remove it.")
    for relative, facts in manifest.files.items():
        file = path / relative
        if not file.is_file():
            raise BundleError("a file of the bundle is missing.", where=str(file), hint="Fetch the bundle again.")
        if file.stat().st_size != facts.size or digest(file) != facts.sha256:
            raise BundleError(
                "its bytes are not those that were packaged.", where=str(file), hint="Fetch the bundle again."
            )


@contextmanager
def load(path: Path, *, threads: int | None = None) -> Iterator[Bundle]:
    """Check the bundle directory `path` byte by byte, open its engine and give a Bundle.

    Args:
        threads: instead of the number it was measured with.

    Raises:
        BundleError: it is incomplete or changed.
        EngineError: its engine can't be opened here.
    """
    manifest = read_manifest(path)
    check_files(path, manifest)
    runner = manifest.runner if threads is None else manifest.runner.model_copy(update={"threads": threads})
    with open_runner(runner, manifest.kind, path / manifest.engine) as run:
        yield Bundle(path, manifest, run)


def digest(path: Path) -> str:
    """Return the sha256 (hex) of a file."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            hasher.update(chunk)
    return hasher.hexdigest()
