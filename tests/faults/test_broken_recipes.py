"""Broken recipes through the command line: one paragraph each, the right line, exit code 2, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from vbpipe.cli import run

GOOD = """recipe: 1
name: net
model:
  factory: net.py:build
  inputs:
    x: {dtype: float32, shape: [batch, 4]}
  outputs: [y]
  shapes:
    batch: {min: 1, opt: 2, max: 8}
variants:
  standard: {}
targets:
  cpu: {backend: onnxruntime}
stages:
  fuse: {level: all}
gates:
  - {metric: speedup, min: 1.0}
"""
NET = "def build():\n    raise AssertionError('check imports nothing')\n\nnumber = 3\n"

_LEVELS = ["a0: &a0 [1, 1, 1]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9))]
BOMB = "\n".join([*_LEVELS, "name: net"])

# (what is replaced, by what, the line of the problem, a piece of its message)
TABLE = [
    ("recipe: 1", "recipe: 2", 1, "understands recipe version 1"),
    ("recipe: 1\n", "", 1, "'recipe' is missing"),
    ("name: net", "name: net\nname: other", 3, "name"),
    ("name: net", "nam: net", 2, "Did you mean 'name'"),
    ("name: net", "name: NO", 0, ""),
    ("name: net", "name: a/b", 2, "name"),
    ("net.py:build", "ne.py:build", 4, "net.py"),
    ("net.py:build", "net.py:biuld", 4, "Did you mean 'build'"),
    ("net.py:build", "net.py", 4, "factory"),
    ("net.py:build", "../net.py:build", 4, "folder"),
    ("net.py:build", "broken.py:build", 1, "syntax"),
    ("dtype: float32", "dtype: float33", 6, "float32"),
    ("dtype: float32", "dtypes: float32", 6, "Did you mean 'dtype'"),
    ("[batch, 4]", "[bach, 4]", 6, "Did you mean 'batch'"),
    ("[batch, 4]", "[batch, 0]", 6, "x.shape"),
    ("[batch, 4]", "[batch, -1]", 6, "x.shape"),
    ("[batch, 4]", "4", 6, "x.shape"),
    ("outputs: [y]", "outputs: [y, y]", 7, "twice"),
    ("outputs: [y]", "outputs: []", 7, "outputs"),
    ("opt: 2", "opt: 9", 9, "min <= opt <= max"),
    ("opt: 2, ", "", 9, "opt"),
    ("max: 8}", "max: eight}", 9, "max"),
    ("max: 8}", "max: 1:30}", 9, "max"),
    ("backend: onnxruntime", "backend: onxruntime", 13, "Did you mean 'onnxruntime'"),
    ("backend: onnxruntime", "backend: onnxruntime, provider: [cpu]", 13, "Did you mean 'providers'"),
    ("backend: onnxruntime", "backend: onnxruntime, threads: 0", 13, "threads"),
    ("targets:\n  cpu: {backend: onnxruntime}\n", "", 1, "targets"),
    ("fuse: {level: all}", "fuze: {level: all}", 15, "Did you mean 'fuse'"),
    ("level: all", "level: most", 15, "extended"),
    ("fuse: {level: all}", "quantize: {default: {weight: int3}}", 15, "weight"),
    ("fuse: {level: all}", "benchmark: {scenarios: [{batch: 99}]}", 15, "batch"),
    ("fuse: {level: all}", "benchmark: {scenarios: [{bach: 1}]}", 15, "Did you mean 'batch'"),
    ("fuse: {level: all}", "benchmark: {taken: 3}", 15, "taken"),
    ("metric: speedup", "metric: speedup, over: standart", 17, "Did you mean 'standard'"),
    ("metric: speedup", "metric: size_mb, over: eager", 17, "not over anything"),
    ("min: 1.0", "minimum: 1.0", 17, "minimum"),
    (", min: 1.0", "", 17, "min, max"),
    ("standard: {}", "standard: {stages.fuze.level: basic}", 11, "Did you mean 'fuse'"),
    ("standard: {}", "standard: {recipe: 2}", 11, "recipe"),
    ("standard: {}", "standard: !!python/object:os.system {}", 11, "tag"),
    ("standard: {}", "standard: {<<: {}}", 11, "merge"),
    ("gates:", "\tgates:", 16, "tab"),
    ("gates:", "gates: [", 17, ""),
    ("name: net", BOMB, 0, "alias"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "broken.py").write_text("def build(:\n")
    return tmp_path


def test_the_recipe_that_all_others_are_made_from_is_good(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "r.yaml").write_text(GOOD)
    assert run(["check", str(folder / "r.yaml")]) == 0
    assert "ok: 1 variant, 1 target" in capsys.readouterr().out


@pytest.mark.parametrize(("old", "new", "line", "piece"), TABLE, ids=lambda v: str(v)[:30])
def test_a_broken_recipe_gets_one_paragraph_with_its_line(
    folder: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, line: int, piece: str
) -> None:
    assert old in GOOD
    recipe = folder / "r.yaml"
    recipe.write_text(GOOD.replace(old, new, 1))
    code = run(["check", str(recipe)])
    said = capsys.readouterr().err
    if new == "name: NO":  # read as the text that it is
        assert (code, said) == (0, "")
        return
    assert code == 2, said
    assert "Traceback" not in said
    assert "\n\n" not in said
    assert piece.lower() in said.lower(), said
    if line:
        where = folder / "broken.py" if "broken" in new else recipe
        assert f"{where.name}:{line}:" in said, said


def test_every_problem_is_named_at_once_in_the_order_of_the_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = GOOD.replace("name: net", "nam: net").replace("float32", "float33").replace("onnxruntime", "onxruntime")
    (folder / "r.yaml").write_text(text)
    assert run(["check", str(folder / "r.yaml")]) == 2
    lines = [part.split(":")[1] for part in capsys.readouterr().err.splitlines() if "r.yaml:" in part]
    assert [line for line in lines if line in ("2", "6", "13")] == ["2", "6", "13"]


@pytest.mark.parametrize(
    ("arguments", "piece"),
    [
        (["check", "absent.yaml"], "no such file"),
        (["check", "."], "folder"),
        (["check"], "Missing argument"),
        (["chek", "r.yaml"], "No such command"),
        (["build", "r.yaml", "--jobs", "many"], "--jobs"),
        (["build", "r.yaml", "--variant", "flash"], "it has standard"),
        (["build", "r.yaml", "--target", "gpu"], "it has cpu"),
        (["check", "r.yaml", "--set", "stages.fuse.level=most"], "--set"),
        (["check", "r.yaml", "--set", "nonsense"], "--set"),
        (["report", "absent.json"], "can't be read"),
        (["report", "r.yaml"], "no report"),
        (["run", "."], "no bundle"),
        (["store", "why", "nothing"], "nothing"),
        (["worker", "run", "r.yaml"], "job"),
        (["init", "net.py:build", "--out", "r.yaml"], "exists"),
        (["init", "absent.py:build", "--out", "new.yaml"], "absent.py"),
    ],
)
def test_a_wrong_command_line_gets_one_paragraph_too(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    piece: str,
) -> None:
    (folder / "r.yaml").write_text(GOOD)
    monkeypatch.chdir(folder)
    code = run(arguments)
    said = capsys.readouterr().err
    assert code in (2, 3)
    assert piece in said, said
    assert "Traceback" not in said
    assert "a bug" not in said
