"""Amounts on the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from vbpipe.cli.amounts import seconds, share


@pytest.mark.parametrize(("text", "expected"), [("1%", 0.01), ("0.01", 0.01), (" 2.5% ", 0.025), ("100%", 1.0)])
def test_a_share_is_written_in_percent_or_not(text: str, expected: float) -> None:
    assert share(text) == pytest.approx(expected)


@pytest.mark.parametrize(("text", "expected"), [("60", 60), ("60s", 60), ("1.5m", 90), ("1h", 3600), (" 2m ", 120)])
def test_a_time_has_a_unit_or_is_in_seconds(text: str, expected: float) -> None:
    assert seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["bench", "nothing.onnx"], 2),
        (["bench", "nothing.onnx", "--precision", "1%", "--budget", "2m"], 2),
        (["bench", "nothing.onnx", "--precision", "1k"], 2),
        (["doctor"], 0),
        (["doctor", "--threads", "2"], 2),
    ],
)
def test_commands_take_defaults_and_amounts_alike(arguments: list[str], code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vbpipe.cli", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "a bug" not in done.stderr


@pytest.mark.parametrize("text", ["", "%", "x", "0%", "0.05%", "101%", "nan", "inf", "-1%"])
def test_what_is_no_share_in_bounds_is_refused_with_how_to_write_one(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"write 1% or 0\.01"):
        share(text)


@pytest.mark.parametrize("text", ["", "s", "0.5", "10d", "nan", "inf", "infs", "-5m", "ten"])
def test_what_is_no_time_is_refused_with_how_to_write_one(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="write 90, 90s or 10m"):
        seconds(text)
