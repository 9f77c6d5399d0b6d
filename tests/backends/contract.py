"""What every backend must do, whatever its runtime: subclass `BackendContract` and give it a `subject`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vbpipe import fidelity
from vbpipe.core import Artifact, Backend, Placed, Run
from vbpipe.errors import EngineError
from vbpipe.recipe.model import Model

Row = Mapping[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True)
class Subject:
    """A backend with something to build: the artifact it reads, and what eager gave for `rows`."""

    backend: Backend
    source: Artifact
    root: Path
    model: Model
    rows: tuple[Row, ...]
    expected: tuple[Row, ...]


class BackendContract:
    """Each test builds afresh, so that none depends on another."""

    @pytest.fixture
    def engine(self, subject: Subject, tmp_path: Path) -> Path:
        return build(subject, tmp_path / "engine")

    @pytest.fixture
    def run(self, subject: Subject, engine: Path) -> Iterator[Run]:
        with opened(subject, engine) as run:
            yield run

    def test_outputs_are_those_of_eager_at_every_size(self, subject: Subject, run: Run) -> None:
        outputs = [run(row) for row in subject.rows]
        for got, want in zip(outputs, subject.expected, strict=True):
            assert fidelity.broken(got, want) is None
        assert fidelity.compare(outputs, subject.expected).max_relative < 1e-4

    def test_outputs_have_the_names_and_the_order_of_the_recipe(self, subject: Subject, run: Run) -> None:
        assert list(run(subject.rows[0])) == list(subject.model.outputs)

    def test_every_source_kind_that_it_runs_gives_eagers_outputs(self, subject: Subject) -> None:
        if subject.source.kind not in subject.backend.runs:
            pytest.skip("it runs engines only")
        with subject.backend.open(subject.source.kind, subject.source.path, 1, subject.root) as run:
            assert fidelity.compare([run(subject.rows[0])], [subject.expected[0]]).max_relative < 1e-4

    def test_inputs_may_come_in_any_order(self, subject: Subject, run: Run) -> None:
        turned = dict(reversed(subject.rows[0].items()))
        assert all(
            np.array_equal(a, b) for a, b in zip(run(turned).values(), run(subject.rows[0]).values(), strict=True)
        )

    def test_a_missing_input_is_named(self, subject: Subject, run: Run) -> None:
        name, *others = subject.model.inputs
        with pytest.raises(EngineError, match=name):
            run({other: subject.rows[0][other] for other in others})

    def test_an_unknown_input_is_named(self, subject: Subject, run: Run) -> None:
        with pytest.raises(EngineError, match="surplus"):
            run({**subject.rows[0], "surplus": np.zeros(1, np.float32)})

    def test_a_wrong_dtype_is_refused_with_the_input_and_both_dtypes(self, subject: Subject, run: Run) -> None:
        name, spec = next(iter(subject.model.inputs.items()))
        with pytest.raises(EngineError, match=rf"{name}.*float16.*{spec.dtype}"):
            run({**subject.rows[0], name: subject.rows[0][name].astype(np.float16)})

    def test_a_wrong_rank_is_refused(self, subject: Subject, run: Run) -> None:
        name = next(iter(subject.model.inputs))
        with pytest.raises(EngineError, match=name):
            run({**subject.rows[0], name: subject.rows[0][name][None]})

    def test_a_size_outside_the_profile_is_refused(self, subject: Subject, run: Run) -> None:
        symbol, dimension = next(iter(subject.model.shapes.items()))
        big = {name: np.repeat(array, dimension.max + 1, axis=0) for name, array in subject.rows[0].items()}
        with pytest.raises(EngineError, match=symbol):
            run(big)

    def test_sizes_that_contradict_each_other_are_refused(self, subject: Subject, run: Run) -> None:
        name = list(subject.model.inputs)[-1]
        twice = np.concatenate([subject.rows[0][name]] * 2)
        with pytest.raises(EngineError, match=name):
            run({**subject.rows[0], name: twice})

    def test_an_input_in_another_memory_order_gives_the_same_outputs(self, subject: Subject, run: Run) -> None:
        strided = {name: np.asfortranarray(array) for name, array in subject.rows[-1].items()}
        for got, want in zip(run(strided).values(), run(subject.rows[-1]).values(), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

    def test_inputs_are_left_as_they_were(self, subject: Subject, run: Run) -> None:
        row = {name: array.copy() for name, array in subject.rows[0].items()}
        run(row)
        assert all(np.array_equal(row[name], array) for name, array in subject.rows[0].items())

    def test_outputs_of_one_run_survive_the_next(self, subject: Subject, run: Run) -> None:
        first = run(subject.rows[0])
        before = {name: array.copy() for name, array in first.items()}
        run(subject.rows[1])
        assert all(np.array_equal(first[name], array) for name, array in before.items())

    def test_two_can_be_open_side_by_side(self, subject: Subject, engine: Path) -> None:
        with ExitStack() as both:
            one, other = (both.enter_context(opened(subject, engine)) for _ in range(2))
            for a, b in zip(one(subject.rows[0]).values(), other(subject.rows[0]).values(), strict=True):
                np.testing.assert_array_equal(a, b)

    def test_a_closed_engine_says_that_it_is_closed(self, subject: Subject, engine: Path) -> None:
        with opened(subject, engine) as run:
            run(subject.rows[0])
        with pytest.raises(EngineError, match="closed"):
            run(subject.rows[0])

    def test_building_twice_gives_the_same_bytes(self, subject: Subject, engine: Path, tmp_path: Path) -> None:
        assert digests(build(subject, tmp_path / "again")) == digests(engine)

    def test_building_leaves_its_source_alone(self, subject: Subject, tmp_path: Path) -> None:
        before = digests(subject.source.path)
        build(subject, tmp_path / "engine")
        assert digests(subject.source.path) == before

    def test_an_engine_still_opens_after_it_was_moved(self, subject: Subject, engine: Path, tmp_path: Path) -> None:
        moved = engine.rename(tmp_path / "elsewhere")
        with opened(subject, moved) as run:
            run(subject.rows[0])

    def test_an_engine_whose_files_are_garbage_is_refused(self, subject: Subject, engine: Path) -> None:
        for path in engine.iterdir():
            path.write_bytes(b"\x00garbage" * 8)
        with (
            pytest.raises(EngineError),
            subject.backend.open("engine", engine, 1, subject.root) as run,
        ):
            run(subject.rows[0])

    def test_an_empty_directory_is_refused(self, subject: Subject, tmp_path: Path) -> None:
        empty = tmp_path / "empty"
        empty.mkdir()
        with pytest.raises(EngineError), subject.backend.open("engine", empty, 1, subject.root):
            pass

    def test_a_kind_that_it_does_not_run_is_refused(self, subject: Subject, engine: Path) -> None:
        with pytest.raises(EngineError, match="tarball"), subject.backend.open("tarball", engine, 1, subject.root):
            pass

    def test_an_engine_for_another_device_says_what_it_needs(self, subject: Subject, engine: Path) -> None:
        needs = pending(subject.backend)
        if not needs:
            pytest.skip("its engines run here")
        with pytest.raises(EngineError, match=needs), subject.backend.open("engine", engine, 1, subject.root):
            pass

    def test_it_says_what_it_is(self, subject: Subject) -> None:
        assert "engine" in subject.backend.runs
        assert subject.backend.fingerprint() == type(subject.backend)().fingerprint()
        assert all(isinstance(value, str) and value for value in subject.backend.fingerprint().values())


def pending(backend: Backend) -> str | None:
    """Return what its engines need and this host lacks."""
    return backend.pending() if isinstance(backend, Placed) else None


def opened(subject: Subject, engine: Path) -> AbstractContextManager[Run]:
    """Return the opened engine; the test is skipped where such engines don't run on this host."""
    needs = pending(subject.backend)
    if needs:
        pytest.skip(f"to run it needs {needs}")
    return subject.backend.open("engine", engine, 1, subject.root)


def build(subject: Subject, out: Path) -> Path:
    """Build into the new directory `out` and return it."""
    out.mkdir()
    meta = subject.backend.build(subject.source, out, 1)
    assert isinstance(meta, Mapping)
    return out


def digests(folder: Path) -> dict[str, str]:
    """Return path to sha256 of every file."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
