"""Figure of communication beside computation in each training step."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from commtrace.formatting import format_duration

from .style import BLUE, GREEN, GREY, VERMILION, finish, hover_texts, time_scale

MAX_BARS: Final = 120
"""If there are more steps, a bar is the mean of neighbours."""


def exposed_communication(table: pd.DataFrame) -> go.Figure:
    """Draw the parts of each step of `exposed_communication` as a stack, means over the ranks."""
    steps = of_steps(table)
    per_rank = steps.filter(like="_ns").div(steps["ranks"], axis=0)
    parts = {
        "computation alone": (per_rank["computation_ns"] - per_rank["hidden_ns"], BLUE, ""),
        "hidden communication": (per_rank["hidden_ns"], GREEN, "/"),
        "exposed communication": (per_rank["exposed_ns"], VERMILION, ""),
        "neither": (per_rank["idle_ns"], GREY, ""),
    }
    scale = time_scale(per_rank["duration_ns"])
    bins = np.array_split(np.arange(len(steps)), min(len(steps), MAX_BARS)) if len(steps) else []
    names = [_name(steps["step"].iloc[rows]) for rows in bins]
    figure = go.Figure()
    for name, (values, colour, pattern) in parts.items():
        means = [float(values.iloc[rows].mean()) for rows in bins]
        hover = [f"step {step}: {name}<br>{format_duration(ns)}" for step, ns in zip(names, means, strict=True)]
        marker = {"color": colour, "pattern": {"shape": pattern}, "line": {"width": 0}}
        figure.add_trace(go.Bar(x=names, y=scale.axis(means), name=name, marker=marker, **hover_texts(hover)))
    figure.update_xaxes(title_text="training step", type="category")
    figure.update_yaxes(title_text=f"time per rank, {scale.unit}", rangemode="tozero")
    figure.update_layout(barmode="stack", bargap=0.2)
    return finish(figure, "Communication beside computation", 360)


def of_steps(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of single steps: the last row is the sum of all that the log has."""
    return table.loc[table["step"].str.isdecimal()]


def _name(steps: pd.Series[str]) -> str:
    """Return the number of a step, or the range of several."""
    first, last = steps.iloc[0], steps.iloc[-1]
    return first if first == last else f"{first}-{last}"
