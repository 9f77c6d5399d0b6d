"""`vbpipe report`: an existing report in another form."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vbpipe.errors import UsageError
from vbpipe.report import as_junit, as_markdown, figures, read_report

FORMATS = ("table", "figures", "markdown", "junit", "json")


def render_report(path: Path, form: str, out: Path | None) -> None:
    """Print the report `path` as `form`, or write it to `out`; raises UsageError for an unknown form."""
    report = read_report(path)
    if form not in FORMATS:
        raise UsageError(f"there is no form {form!r}.", where="--format", hint=f"Use one of {', '.join(FORMATS)}.")
    if form in ("table", "figures"):
        if out is not None:
            raise UsageError("the table is for terminals.", where="--out", hint="Use --format markdown.")
        _print(report, form)
        return
    text = {"markdown": as_markdown, "junit": as_junit}.get(form, lambda r: json.dumps(r, indent=1) + "\n")(report)
    if out is None:
        sys.stdout.write(text)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"it can't be written: {error.strerror}.", where=str(out)) from error


def _print(report: Mapping[str, Any], form: str) -> None:
    from vbpipe.cli.build import print_report
    from vbpipe.cli.terminal import print_grid, stdout

    if form == "table":
        print_report(report)
        return
    for target in report["targets"]:
        for table in figures(report, target):
            print_grid(stdout(), table)
