"""Figures of a run: each is a function from one table to a plotly figure.

    import commtrace
    run = commtrace.open("logs/run1")
    run.figure("message_sizes")                             # in Jupyter, this shows it

    from commtrace.analyses import figures
    figures.message_sizes(run.table("message_size_bins"))   # the same, of a table that may be your own

and of several runs:

    from commtrace.analyses.comparison import compare
    tables = compare({"ddp": run, "zero3": other})
    figures.operation_shares(tables["runs_by_operation"])

`FIGURES`, `COMPARISONS` and `SCALING` name them all, with the table that each is drawn from and what to look for in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commtrace.errors import MissingLibraryError, NoSuchFigureError, NoSuchTableError

try:
    import plotly.graph_objects as go
except ImportError:
    raise MissingLibraryError("figures need plotly; pip install 'commtrace[html]'") from None

from .catalog import COMPARISONS, FIGURES, SCALING, Figure
from .reconciliation import expected_and_measured, waterfall, waterfall_by_role
from .run_comparison import measured_and_predicted, operation_shares, operation_volumes, predicted_by_role, role_volumes
from .scaling import speedup, step_parts
from .sizes import message_sizes, sizes_over_time
from .step_timeline import timeline
from .step_volumes import steps
from .volumes import volume

if TYPE_CHECKING:
    import pandas as pd

    from commtrace.run import Run

__all__ = [
    "COMPARISONS",
    "FIGURES",
    "SCALING",
    "Figure",
    "expected_and_measured",
    "figure",
    "measured_and_predicted",
    "message_sizes",
    "operation_shares",
    "operation_volumes",
    "predicted_by_role",
    "role_volumes",
    "sizes_over_time",
    "speedup",
    "step_parts",
    "steps",
    "timeline",
    "volume",
    "waterfall",
    "waterfall_by_role",
]


def figure(run: Run, name: str) -> go.Figure:
    """The figure called `name` in FIGURES, of a run. Raises NoSuchFigureError."""
    if name not in FIGURES:
        raise NoSuchFigureError(f"no figure is called {name!r}; there are {', '.join(FIGURES)}")
    kind = FIGURES[name]
    table = _table(run, kind.table)
    if table is None or not kind.can(table):
        raise NoSuchFigureError(f"{name}: {kind.absent}")
    return kind.draw(table)


def _table(run: Run, name: str) -> pd.DataFrame | None:
    try:
        return run.table(name)
    except NoSuchTableError:
        return None
