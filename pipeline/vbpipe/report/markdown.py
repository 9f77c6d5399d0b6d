"""The report as GitHub-flavoured Markdown, short enough for a job summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vbpipe.report.figures import figures
from vbpipe.report.table import Grid, conclusions, grid

LIMIT_BYTES = 60_000
"""Below GitHub's 65,536 characters for a comment."""


def as_markdown(report: Mapping[str, Any]) -> str:
    """Return the report as Markdown; what a model or a tool named is escaped."""
    lines = [f"## vbpipe: {_escape(report['recipe']['name'])}", ""]
    for target in report["targets"]:
        table = grid(report, target)
        lines += _table(table) if table is not None else []
        lines += [f"- {_escape(sentence.text.strip())}" for sentence in conclusions(report, target)]
        lines.append("")
    failed = [step for step in report["steps"] if step["status"] == "failed"]
    if failed:
        lines += ["### Failed steps", ""]
        lines += [f"- {_escape(step['identities'][0])}: {_escape(step['error'])}" for step in failed]
        lines.append("")
    # Last, because they are what a limit may cut.
    lines += [line for target in report["targets"] for table in figures(report, target) for line in _table(table)]
    text = "\n".join(lines).rstrip() + "\n"
    if len(text.encode()) <= LIMIT_BYTES:
        return text
    return text.encode()[:LIMIT_BYTES].decode(errors="ignore") + "\n\ntruncated; report.json has everything.\n"


def _table(table: Grid) -> list[str]:
    lines = [f"### {_escape(table.title)}", ""]
    lines.append("| " + " | ".join(_escape(c) for c in table.columns) + " |")
    lines.append("|" + " --- |" * len(table.columns))
    lines += ["| " + " | ".join(_escape(cell.text) for cell in row) + " |" for row in table.rows]
    return [*lines, ""]


def _escape(text: object) -> str:
    found = " ".join(str(text).split())
    for mark in "\\`*_[]<>|":
        found = found.replace(mark, f"\\{mark}" if mark not in "<>" else {"<": "&lt;", ">": "&gt;"}[mark])
    return found
