"""Figures of runs on increasing numbers of ranks."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from commtrace.formatting import format_duration, format_share

from .style import BLUE, CLOSED_FORM, GREY, ORANGE, VERMILION, finish, horizontal_bars, hover_texts, label, time_scale


def speedup(table: pd.DataFrame) -> go.Figure:
    """Draw speedup and efficiency against the number of ranks, beside a perfect division.

    Args:
        table: `scaling`.
    """
    ranks, first = table["ranks"], table["ranks"].iloc[0]
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12)
    hover = [
        f"{label(run)}<br>{count} ranks<br>{ratio:.2f}x, {format_share(part)}"
        for run, count, ratio, part in zip(table["run"], ranks, table["speedup"], table["efficiency"], strict=True)
    ]
    ideal = {"mode": "lines", "line": {"color": CLOSED_FORM, "dash": "dot"}, "hoverinfo": "skip"}
    seen = {
        "mode": "lines+markers",
        "line": {"color": BLUE},
        "marker": {"size": 9},
        **hover_texts(hover),
    }
    figure.add_scatter(x=ranks, y=ranks / first, name="perfect division", row=1, col=1, **ideal)
    figure.add_scatter(x=ranks, y=table["speedup"], name="measured", row=1, col=1, **seen)
    figure.add_scatter(x=ranks, y=[100.0] * len(table), showlegend=False, row=1, col=2, **ideal)
    figure.add_scatter(x=ranks, y=table["efficiency"] * 100, showlegend=False, row=1, col=2, **seen)
    ticks = sorted(set(ranks))
    figure.update_xaxes(title_text="ranks", type="log", tickvals=ticks, ticktext=[str(tick) for tick in ticks])
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text="speedup", row=1, col=1)
    figure.update_yaxes(title_text="efficiency, %", row=1, col=2)
    return finish(figure, "Speedup and efficiency", 380)


def step_parts(table: pd.DataFrame) -> go.Figure:
    """Draw where the time of a step goes, a bar per run, means over its ranks.

    Args:
        table: `scaling`.
    """
    parts = {
        "computing": (table["compute_ns"], BLUE),
        "communication": (table["blocked_ns"] - table["late_ns"], ORANGE),
        "waiting for late ranks": (table["late_ns"], VERMILION),
    }
    if table["compute_ns"].isna().any():
        parts = {"whole step": (table["step_ns"], GREY), **{name: parts[name] for name in list(parts)[1:]}}
    scale = time_scale(table["step_ns"])
    runs = [f"{label(run)}, {ranks} ranks" for run, ranks in zip(table["run"], table["ranks"], strict=True)]
    figure = go.Figure()
    for name, (values, colour) in parts.items():
        hover = [f"{run}: {name}<br>{format_duration(value)}" for run, value in zip(runs, values, strict=True)]
        figure.add_trace(horizontal_bars(runs, scale.axis(values), hover, name=name, marker={"color": colour}))
    figure.update_xaxes(title_text=f"a training step, {scale.unit}", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    figure.update_layout(barmode="group" if table["compute_ns"].isna().any() else "stack")
    return finish(figure, "Where the time of a step goes", 150 + 46 * len(table))
