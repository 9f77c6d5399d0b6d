"""`vbpipe report`: an existing report in another form."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vbpipe.errors import UsageError
from vbpipe.report import against_markdown, as_junit, as_markdown, compare_reports, figures, precisions, read_report

FORMATS = ("table", "figures", "precision", "markdown", "junit", "json")
COMPARED = ("table", "markdown")
"""Forms of a comparison with another report."""


def render_report(path: Path, form: str, out: Path | None) -> None:
    """Print the report `path` as `form`, or write it to `out`; raises UsageError for an unknown form."""
    report = read_report(path)
    if form not in FORMATS:
        raise UsageError(f"there is no form {form!r}.", where="--format", hint=f"Use one of {', '.join(FORMATS)}.")
    if form in ("table", "figures", "precision"):
        if out is not None:
            raise UsageError("the table is for terminals.", where="--out", hint="Use --format markdown.")
        _print(report, form)
        return
    _write(
        {"markdown": as_markdown, "junit": as_junit}.get(form, lambda r: json.dumps(r, indent=1) + "\n")(report), out
    )


def render_comparison(path: Path, other: Path, form: str, out: Path | None, *, across_hosts: bool) -> None:
    """Print what comes of comparing the report `path` with `other`, or write it to `out`.

    Raises:
        UsageError: an unknown form; nothing to compare; or the hosts are unequal and `across_hosts` is not set.
    """
    here, there = read_report(path), read_report(other)
    if form not in COMPARED:
        message = f"a comparison has no form {form!r}."
        raise UsageError(message, where="--format", hint=f"Use one of {', '.join(COMPARED)}.")
    if form == "table" and out is not None:
        raise UsageError("the table is for terminals.", where="--out", hint="Use --format markdown.")
    found = compare_reports(here, there)
    if found.differs and not across_hosts:
        raise UsageError(
            f"measured on unequal hosts: {'; '.join(found.differs)}.",
            where="--against",
            hint="Speeds of unequal hosts can't be compared. --across-hosts prints them all the same, under a banner.",
        )
    if form == "markdown":
        _write(against_markdown(found, here["recipe"]["name"]), out)
        return
    from vbpipe.cli.terminal import print_grid, stdout

    console = stdout()
    if found.banner:
        console.print(found.banner, markup=False, soft_wrap=True)
    for table in found.grids:
        print_grid(console, table)
    for note in found.notes:
        console.print(note, markup=False, soft_wrap=True)


def _write(text: str, out: Path | None) -> None:
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
    if form == "precision":
        _print_precisions(report)
        return
    for target in report["targets"]:
        for table in figures(report, target):
            print_grid(stdout(), table)


def _print_precisions(report: Mapping[str, Any]) -> None:
    from vbpipe.cli.terminal import print_grid, stdout

    tables = list(precisions(report))
    if not tables:
        stdout().print("nothing of it was quantized.")
    for table in tables:
        print_grid(stdout(), table)
