"""Where text goes: results to stdout, progress and warnings to stderr, colour only where it is wanted."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vbpipe.report.table import Cell, Grid

_STYLES = {"plain": "", "good": "green", "bad": "red", "doubtful": "yellow", "faint": "dim"}
_PLAIN_WIDTH = 220
"""Width of tables that go to a file or a pipe: wide enough not to wrap a cell."""


def stdout() -> Console:
    """Return the console for results; rich honours NO_COLOR and drops colour when it is no terminal."""
    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    return Console(file=sys.stdout, width=width, highlight=False)


def stderr() -> Console:
    """Return the console for progress and warnings."""
    return Console(file=sys.stderr, highlight=False)


def print_json(document: object) -> None:
    """Print one JSON document on stdout."""
    sys.stdout.write(json.dumps(document, indent=1, default=str) + "\n")


def print_grid(console: Console, grid: Grid) -> None:
    """Print a table."""
    console.print(Text(grid.title), soft_wrap=True)
    table = Table(header_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(grid.columns):
        table.add_column(column, no_wrap=index == 0 or not console.is_terminal)
    for row in grid.rows:
        table.add_row(*(styled(cell) for cell in row))
    print_table(console, table)


def print_table(console: Console, table: Table) -> None:
    """Print a table, off a terminal without the spaces that pad its lines."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    console.file.write("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")


def styled(cell: Cell) -> Text:
    """Return the cell as text that rich never reads as markup: names in it come from models."""
    return Text(cell.text, style=_STYLES[cell.tone])


def facts_table(rows: Mapping[str, Any]) -> Table:
    """Return a two-column table of names and values."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(str(value)))
    return table
