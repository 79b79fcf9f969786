"""Figures of a run: each is a function from one table to a plotly figure.

    import commtrace
    run = commtrace.open("logs/run1")
    run.figure("message_sizes")                             # shown in Jupyter

    from commtrace.analyses import figures
    figures.message_sizes(run.table("message_size_bins"))   # the same, of any table with its columns

and of several runs:

    from commtrace.analyses.comparison import compare
    tables = compare({"ddp": run, "zero3": other})
    figures.operation_shares(tables["runs_by_operation"])

`FIGURES`, `COMPARISONS` and `SCALING` list all figures, with the table of each and what to look for in it. A figure of
a new question is a function in a module of this folder and an entry in `catalog`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commtrace.errors import MissingLibraryError, NoSuchFigureError, NoSuchTableError

try:
    import plotly.graph_objects as go
except ImportError:
    raise MissingLibraryError("figures need plotly; pip install 'commtrace[html]'") from None

from .figure_catalog import COMPARISONS, FIGURES, SCALING, Figure
from .reconciliation import expected_and_measured, waterfall, waterfall_by_role
from .run_comparison import measured_and_predicted, operation_shares, operation_volumes, predicted_by_role, role_volumes
from .scaling import speedup, step_parts
from .sizes import message_sizes, sizes_over_time
from .step_timeline import timeline
from .step_volumes import steps
from .volumes import volume

if TYPE_CHECKING:
    from commtrace.run import Run

__all__ = [
    "COMPARISONS", "FIGURES", "SCALING", "Figure", "expected_and_measured", "figure", "measured_and_predicted",
    "message_sizes", "operation_shares", "operation_volumes", "predicted_by_role", "role_volumes", "sizes_over_time",
    "speedup", "step_parts", "steps", "timeline", "volume", "waterfall", "waterfall_by_role",
]  # fmt: skip


def figure(run: Run, name: str) -> go.Figure:
    """Draw a figure of a run.

    Args:
        run: The run.
        name: One of FIGURES.

    Raises:
        NoSuchFigureError: There is no such figure, or the run has nothing to draw.
    """
    if name not in FIGURES:
        raise NoSuchFigureError(f"there is no figure {name!r}; figures are {', '.join(FIGURES)}")
    entry = FIGURES[name]
    try:
        table = run.table(entry.table)
    except NoSuchTableError:
        raise NoSuchFigureError(f"{name}: {entry.absent}") from None
    if not entry.has_data(table):
        raise NoSuchFigureError(f"{name}: {entry.absent}")
    return entry.draw(table)
