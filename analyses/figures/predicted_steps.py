"""Figures of predicted steps: what changes gain, a step before and after, the bandwidth that is needed, layouts."""

from __future__ import annotations

from typing import Any, Final

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from commtrace.analyses.grouping import rows_of
from commtrace.analyses.what_if.bandwidth_bounds import EXPOSED_TARGETS
from commtrace.analyses.what_if.timelines import AFTER, BEFORE, COMPUTATION
from commtrace.formatting import format_duration, format_share, is_known

from . import style
from .style import BLUE, GREEN, GREY, VERMILION, finish, horizontal_bars, hover_texts, in_order, label, span_bars

MAX_CHANGES: Final = 40
MAX_BARS: Final = 3000
"""Bars of a timeline: the longest ones."""
_COLOURS: Final = (BLUE, VERMILION, GREEN, style.ORANGE, style.PINK, style.SKY, GREY)
"""Of dimensions."""


def gains(table: pd.DataFrame) -> go.Figure:
    """Draw the part of the recorded step that each change of `what_if` saves, with its interval."""
    recorded, rows = float(table["step_ns"].iloc[0]), table.iloc[1:].head(MAX_CHANGES)
    names = [label(change) for change in rows["change"]]
    ends = [(100 * (1 - rows[name] / recorded)) for name in ("high_ns", "low_ns")]
    gain = 100 * rows["gain"]
    hover = [
        f"{name}<br>{format_duration(row.step_ns)} ({_interval(row)}), {format_share(row.gain)} less<br>"
        f"then limited by {label(row.limits)}"
        for name, row in zip(names, rows_of(rows), strict=True)
    ]
    errors = {
        "type": "data", "symmetric": False, "color": style.INK, "thickness": 1,
        "array": [*(ends[1] - gain).fillna(0)], "arrayminus": [*(gain - ends[0]).fillna(0)],
    }  # fmt: skip
    colours = [BLUE if value >= 0 else VERMILION for value in gain]
    figure = go.Figure(horizontal_bars(names, [*gain], hover, error_x=errors, marker={"color": colours}))
    figure.update_xaxes(title_text=f"part of the recorded step of {format_duration(recorded)} that is saved, %")
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    return finish(figure, "What each change gains", 150 + 26 * len(rows))


def _interval(row: Any) -> str:
    if not is_known(row.low_ns):
        return "its error is not known"
    return f"{format_duration(row.low_ns)} to {format_duration(row.high_ns)}"


def step_timelines(table: pd.DataFrame) -> go.Figure:
    """Draw `step_timelines`: what ranks compute and transfer in a step before and after changes, on one axis."""
    ranks = sorted(table["rank"].unique())
    place = {rank: number for number, rank in enumerate(ranks)}
    scale = style.time_scale(table["step_ns"])
    states = [state for state in (BEFORE, AFTER) if (table["state"] == state).any()]
    lengths = {state: float(table.loc[table["state"] == state, "step_ns"].iloc[0]) for state in states}
    titles = [f"{state}: {format_duration(lengths[state])}" for state in states]
    figure = make_subplots(
        rows=max(len(states), 1), cols=1, shared_xaxes=True, vertical_spacing=0.12, subplot_titles=titles
    )
    for panel, state in enumerate(states, start=1):
        rows = table.loc[table["state"] == state].nlargest(MAX_BARS, "ns").sort_values("begin_ns", kind="stable")
        kinds = [(COMPUTATION, -0.2, {"name": COMPUTATION, "marker": {"color": GREY}})]
        operations = in_order(rows.loc[rows["part"] != COMPUTATION, "part"])
        kinds += [(op, 0.2, style.operation_style(op)) for op in operations]
        for part, lane, paint in kinds:
            own = rows.loc[rows["part"] == part]
            y = [place[rank] + lane for rank in own["rank"]]
            hover = [
                f"rank {row.rank}, {label(' '.join(filter(None, (row.role, row.part))))}<br>{format_duration(row.ns)}"
                for row in rows_of(own)
            ]
            options = {"y": y, "hover": hover, "width": 0.36, **paint}
            figure.add_trace(span_bars(own["begin_ns"], own["ns"], scale, **options), row=panel, col=1)
        end = {"line": {"width": 1.5, "color": style.INK, "dash": "dot"}, "row": panel, "col": 1}
        figure.add_vline(x=lengths[state] / scale.divisor, **end)
        figure.update_yaxes(**style.numbered_rows(f"rank {rank}" for rank in ranks), row=panel, col=1)
    style.show_legend_once(figure)
    figure.update_xaxes(title_text=f"time since the step began, {scale.unit}", row=max(len(states), 1), col=1)
    figure.update_layout(barmode="overlay", margin={"t": 70})  # titles of the panels
    step = f", {int(table['step'].iloc[0])}" if len(table) else ""
    return finish(figure, f"A step before and after{step}", 190 + 64 * len(states) * max(len(ranks), 1))


def exposed_by_speed(table: pd.DataFrame) -> go.Figure:
    """Draw `exposed_by_speed`: the exposed part of a step by the speed of transfers, and the recorded one."""
    figure = go.Figure()
    for number, dimension in enumerate(table["dimension"].unique()):
        own = table.loc[table["dimension"] == dimension].sort_values("speed")
        colour, name = _COLOURS[number % len(_COLOURS)], label(dimension)
        curve = own.loc[~own["is_recorded"].astype(bool)]
        hover = [f"{name}: {row.speed:.3g}x<br>{format_share(row.exposed)} exposed" for row in rows_of(curve)]
        figure.add_scatter(x=curve["speed"], y=100 * curve["exposed"], name=name, mode="lines",
            line={"color": colour}, legendgroup=name, **hover_texts(hover))  # fmt: skip
        now = own.loc[own["is_recorded"].astype(bool)]
        hover = [f"{name}, as recorded<br>{format_share(row.exposed)} exposed" for row in rows_of(now)]
        figure.add_scatter(x=now["speed"], y=100 * now["exposed"], name=f"{name}, as recorded", mode="markers",
            marker={"color": colour, "size": 10}, legendgroup=name, **hover_texts(hover))  # fmt: skip
    _finish_exposed(figure, "speed of the transfers, times that of now")
    return finish(figure, "Exposed communication by the speed of transfers", 400)


def exposed_by_bandwidth(table: pd.DataFrame) -> go.Figure:
    """Draw `exposed_by_bandwidth`: between which shares of a step transfers are exposed, by the bandwidth of a rank."""
    figure = go.Figure()
    bounds = {"exposed_low": "if all is hidden that dependencies allow", "exposed_high": "if nothing is hidden"}
    for number, dimension in enumerate(table["dimension"].unique()):
        own = table.loc[table["dimension"] == dimension].sort_values("gb_per_s")
        name, line = label(dimension), {"color": _COLOURS[number % len(_COLOURS)]}
        for column, bound in bounds.items():
            hover = [
                f"{name}: {gb_per_s:.3g} GB/s<br>{format_share(share)} exposed {bound}"
                for gb_per_s, share in zip(own["gb_per_s"], own[column], strict=True)
            ]
            area = {"fill": "tonexty"} if column == "exposed_high" else {"showlegend": False}
            figure.add_scatter(x=own["gb_per_s"], y=100 * own[column], name=name, mode="lines", line=line,
                legendgroup=name, **area, **hover_texts(hover))  # fmt: skip
    _finish_exposed(figure, "bandwidth of a rank, GB/s")
    return finish(figure, "Exposed communication by bandwidth", 400)


def _finish_exposed(figure: go.Figure, title: str) -> None:
    for target in EXPOSED_TARGETS:
        figure.add_hline(y=100 * target, line={"width": 1, "dash": "dot", "color": style.CLOSED_FORM})
    figure.update_xaxes(title_text=title, type="log")
    figure.update_yaxes(title_text="exposed part of a step, %", rangemode="tozero")


def layout_bounds(table: pd.DataFrame) -> go.Figure:
    """Draw the bounds of the step of each layout of `layouts`, for equal batches."""
    low, high = table["low_ns"] / table["batch"], table["high_ns"] / table["batch"]
    scale = style.time_scale(high)
    names = [label(run) for run in table["run"]]
    hover = [
        f"{name}<br>{format_duration(least)} to {format_duration(most)} for a batch of the first dry run<br>"
        f"{label(row.limits)}"
        for name, least, most, row in zip(names, low, high, rows_of(table), strict=True)
    ]
    computation = table["computation_ns"] / table["batch"]
    alone = [f"{name}<br>computation {format_duration(ns)}" for name, ns in zip(names, computation, strict=True)]
    figure = go.Figure(
        span_bars(low, high - low, scale, y=names, hover=hover, name="all hidden to nothing hidden",
            marker={"color": BLUE})
    )  # fmt: skip
    figure.add_scatter(x=scale.axis(computation), y=names, mode="markers", name="computation alone",
        marker={"color": style.INK, "symbol": "line-ns-open", "size": 14},
        **hover_texts(alone),
    )  # fmt: skip
    figure.update_xaxes(title_text=f"a step, for equal batches, {scale.unit}", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    return finish(figure, "Steps of layouts", 170 + 40 * len(table))


def projection(table: pd.DataFrame) -> go.Figure:
    """Draw `scaling_projection`: the step by the model for each number of ranks, and the measured ones."""
    scale = style.time_scale([*table["step_ns"], *table["measured_ns"].dropna()])
    figure = go.Figure()
    parts = {
        "computation": ("compute_ns", BLUE), "latency": ("latency_ns", style.SKY),
        "bandwidth": ("bandwidth_ns", style.ORANGE), "waiting for late ranks": ("late_ns", VERMILION),
    }  # fmt: skip
    for name, (column, colour) in parts.items():
        hover = [
            f"{ranks} ranks: {name}<br>{format_duration(ns)}"
            for ranks, ns in zip(table["ranks"], table[column], strict=True)
        ]
        figure.add_scatter(x=table["ranks"], y=scale.axis(table[column]), name=name, mode="lines", stackgroup="model",
            line={"color": colour, "width": 1}, **hover_texts(hover))  # fmt: skip
    measured = table.loc[table["measured_ns"].notna()]
    hover = [f"{row.ranks} ranks, measured<br>{format_duration(row.measured_ns)}" for row in rows_of(measured)]
    figure.add_scatter(x=measured["ranks"], y=scale.axis(measured["measured_ns"]), name="measured", mode="markers",
        marker={"color": style.INK, "size": 9}, **hover_texts(hover))  # fmt: skip
    ticks = sorted({*table["ranks"]})
    figure.update_xaxes(title_text="ranks", type="log", tickvals=ticks, ticktext=[str(tick) for tick in ticks])
    figure.update_yaxes(title_text=f"a training step, {scale.unit}", rangemode="tozero")
    return finish(figure, "The model, and more ranks", 400)
