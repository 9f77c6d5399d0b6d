"""The report as GitHub-flavoured Markdown, short enough for a job summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vbpipe.report.figures import figures
from vbpipe.report.precision import precisions
from vbpipe.report.table import Grid, conclusions, grid

LIMIT_BYTES = 60_000
"""Below GitHub's 65,536 characters for a comment."""


def as_markdown(report: Mapping[str, Any]) -> str:
    """Return the report as Markdown; what a model or a tool named is escaped."""
    lines = [f"## vbpipe: {escape(report['recipe']['name'])}", ""]
    for target in report["targets"]:
        table = grid(report, target)
        lines += table_lines(table) if table is not None else []
        lines += [f"- {escape(sentence.text.strip())}" for sentence in conclusions(report, target)]
        lines.append("")
    failed = [step for step in report["steps"] if step["status"] == "failed"]
    if failed:
        lines += ["### Failed steps", ""]
        lines += [f"- {escape(step['identities'][0])}: {escape(step['error'])}" for step in failed]
        lines.append("")
    lines += _measured_on(report)
    # Last, because they are what a limit may cut.
    tables = [table for target in report["targets"] for table in figures(report, target)]
    lines += [line for table in [*precisions(report), *tables] for line in table_lines(table)]
    text = "\n".join(lines).rstrip() + "\n"
    if len(text.encode()) <= LIMIT_BYTES:
        return text
    return text.encode()[:LIMIT_BYTES].decode(errors="ignore") + "\n\ntruncated; report.json has everything.\n"


def table_lines(table: Grid) -> list[str]:
    """Return a table under its title, a line each; what a model or a tool named is escaped."""
    lines = [f"### {escape(table.title)}", ""]
    lines.append("| " + " | ".join(escape(c) for c in table.columns) + " |")
    lines.append("|" + " --- |" * len(table.columns))
    lines += ["| " + " | ".join(escape(cell.text) for cell in row) + " |" for row in table.rows]
    return [*lines, ""]


def escape(text: object) -> str:
    """Return the text on one line, without anything that Markdown or HTML would read as a mark."""
    found = " ".join(str(text).split())
    for mark in "\\`*_[]<>|":
        found = found.replace(mark, f"\\{mark}" if mark not in "<>" else {"<": "&lt;", ">": "&gt;"}[mark])
    return found


def _measured_on(report: Mapping[str, Any]) -> list[str]:
    """Return where the times come from: the host and the libraries, for each target that was judged."""
    lines = []
    for target, facts in report["targets"].items():
        verdict = facts["verdict"]
        if verdict is None:
            continue
        told = [f"{name} {value}" for name, value in verdict["host"].items() if name != "processor"]
        told.append(f"gpu: {verdict.get('gpu', 'not recorded')}")
        libraries = [f"{name} {version}" for name, version in verdict.get("libraries", {}).items()]
        host = f"{verdict['host']['processor']}, {', '.join(told)}"
        lines.append(f"- {escape(target)}: {escape(host)}; {escape(', '.join(libraries) or 'libraries not recorded')}")
    return ["### Measured on", "", *lines, ""] if lines else []
