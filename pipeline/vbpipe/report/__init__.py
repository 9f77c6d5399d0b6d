"""What a build found, as one JSON document, and the forms people read it in."""

from vbpipe.report.against import Comparison, against_markdown, compare_reports
from vbpipe.report.document import FORMAT, exit_code, make_report, read_report
from vbpipe.report.figures import figures
from vbpipe.report.junit import as_junit
from vbpipe.report.markdown import as_markdown
from vbpipe.report.precision import precisions
from vbpipe.report.table import Cell, Grid, conclusions, grid

__all__ = [
    "FORMAT",
    "Cell",
    "Comparison",
    "Grid",
    "against_markdown",
    "as_junit",
    "as_markdown",
    "compare_reports",
    "conclusions",
    "exit_code",
    "figures",
    "grid",
    "make_report",
    "precisions",
    "read_report",
]
