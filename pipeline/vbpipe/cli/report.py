"""`vbpipe report`: an existing report in another form."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vbpipe.errors import UsageError
from vbpipe.report import as_junit, as_markdown, read_report

FORMATS = ("table", "markdown", "junit", "json")


def render_report(path: Path, form: str, out: Path | None) -> None:
    """Print the report `path` as `form`, or write it to `out`; raises UsageError for an unknown form."""
    report = read_report(path)
    if form not in FORMATS:
        raise UsageError(f"there is no form {form!r}.", where="--format", hint=f"Use one of {', '.join(FORMATS)}.")
    if form == "table":
        from vbpipe.cli.build import print_report

        if out is not None:
            raise UsageError("the table is for terminals.", where="--out", hint="Use --format markdown.")
        print_report(report)
        return
    text = {"markdown": as_markdown, "junit": as_junit}.get(form, lambda r: json.dumps(r, indent=1) + "\n")(report)
    if out is None:
        sys.stdout.write(text)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"it can't be written: {error.strerror}.", where=str(out)) from error
