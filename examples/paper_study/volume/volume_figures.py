"""Figures of the volume part: functions from a table to a plotly figure with a panel for each model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from commtrace.analyses.figures.style import (
    BLUE,
    CLOSED_FORM,
    GREEN,
    MORE,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    bytes_scale,
    finish,
    in_order,
    label,
    paint,
    show_legend_once,
    stack_totals,
    time_scale,
)
from commtrace.analyses.grouping import rows_of
from commtrace.formatting import format_bytes, format_count, format_duration, format_power_of_two, format_share
from commtrace.volume import size_bins

_LINES: Final = (BLUE, ORANGE, GREEN, PINK, VERMILION, SKY, CLOSED_FORM, MORE)
_THREE: Final = {
    "closed_form_bytes": ("the paper's closed form", CLOSED_FORM),
    "exact_bytes": ("expected calls", GREEN),
    "recorded_bytes": ("recorded", MORE),
}
_BAR: Final = 27
"""Height of a bar, px."""
_ROOM: Final = 92
"""Height of a panel's title and axis, px."""


def shares(table: pd.DataFrame, title: str) -> go.Figure:
    """Draw the share of each operation in the payload. `table`: `model`, `name` (a bar), `op`, `payload_bytes`."""
    totals = table.groupby(["model", "name"], sort=False)["payload_bytes"].transform("sum")
    table = table.assign(share=(table["payload_bytes"] / totals).where(totals > 0))

    def draw(figure: go.Figure, part: pd.DataFrame, place: dict[str, int]) -> None:
        for op in in_order(part.loc[part["payload_bytes"] > 0, "op"]):
            rows = part.loc[part["op"] == op]
            figure.add_trace(
                _bar(
                    rows,
                    op,
                    rows["share"] * 100,
                    text=[format_share(value) if value >= 0.06 else "" for value in rows["share"]],
                    hover=[
                        f"{label(op)}<br>{format_share(row.share)}, {format_bytes(row.payload_bytes)}"
                        for row in rows_of(rows)
                    ],
                ),
                **place,
            )
        figure.update_xaxes(range=[0, 100], ticksuffix=" %", **place)

    return _stacked(table, draw, title)


def volumes(table: pd.DataFrame, title: str, axis: str) -> go.Figure:
    """Draw the payload by operation; each panel has its own unit. `table`: `model`, `name`, `op`, `payload_bytes`."""

    def draw(figure: go.Figure, part: pd.DataFrame, place: dict[str, int]) -> None:
        totals = part.groupby("name", sort=False)["payload_bytes"].sum()
        scale = bytes_scale(totals)
        for op in in_order(part.loc[part["payload_bytes"] > 0, "op"]):
            rows = part.loc[part["op"] == op]
            hover = [f"{label(op)}<br>{format_bytes(value)}" for value in rows["payload_bytes"]]
            figure.add_trace(_bar(rows, op, scale.axis(rows["payload_bytes"]), hover=hover), **place)
        figure.add_trace(stack_totals(totals, scale.axis(totals)), **place)
        figure.update_xaxes(title_text=f"{axis}, {scale.unit}", range=[0, 1.25 * scale.reach(totals)], **place)

    return _stacked(table, draw, title)


def totals(table: pd.DataFrame, title: str, axis: str) -> go.Figure:
    """Draw wire bytes by parallel dimension. `table`: `model`, `name`, `role`, `wire_bytes`."""
    colours = {"data": BLUE, "tensor": ORANGE, "pipeline": SKY, "model": PINK}

    def draw(figure: go.Figure, part: pd.DataFrame, place: dict[str, int]) -> None:
        sums = part.groupby("name", sort=False)["wire_bytes"].sum()
        scale = bytes_scale(sums)
        for role, rows in part.groupby("role", sort=False):
            if rows["wire_bytes"].sum() > 0:
                hover = [f"{label(role)}<br>{format_bytes(value)}" for value in rows["wire_bytes"]]
                bar = _bar(rows, str(role), scale.axis(rows["wire_bytes"]), hover=hover)
                bar.update(marker={"color": colours.get(str(role), CLOSED_FORM), "pattern": {"shape": ""}})
                figure.add_trace(bar, **place)
        figure.add_trace(stack_totals(sums, scale.axis(sums)), **place)
        figure.update_xaxes(title_text=f"{axis}, {scale.unit}", range=[0, 1.25 * scale.reach(sums)], **place)

    return _stacked(table, draw, title)


def against(table: pd.DataFrame, title: str, axis: str) -> go.Figure:
    """Draw recorded and expected bytes, and the closed form.

    `table`: `model`, `name`, `recorded_bytes`, `exact_bytes`, `closed_form_bytes`.
    """

    def draw(figure: go.Figure, part: pd.DataFrame, place: dict[str, int]) -> None:
        values = [value for name in _THREE for value in part[name]]
        scale = bytes_scale(values)
        for name, (words, colour) in _THREE.items():
            ratios = (part[name] / part["closed_form_bytes"]).where(part["closed_form_bytes"] > 0)
            times = [f" · {ratio:.3g} x" if name == "recorded_bytes" and pd.notna(ratio) else "" for ratio in ratios]
            hover = [f"{words}<br>{format_bytes(value)}<br>{format_count(value)} bytes" for value in part[name]]
            bar = _bar(part, words, scale.axis(part[name]), hover=hover)
            bar.update(
                marker={"color": colour, "pattern": {"shape": ""}},
                text=[f"{format_bytes(value)}{more}" for value, more in zip(part[name], times, strict=True)],
                textposition="outside",
                textangle=0,
                cliponaxis=False,
            )
            figure.add_trace(bar, **place)
        figure.update_xaxes(title_text=f"{axis}, {scale.unit}", range=[0, 1.42 * scale.reach(values)], **place)

    figure = _panels(table, draw, bars=2 * int(table.groupby("model")["name"].nunique().max()))
    figure.update_layout(barmode="group", bargap=0.25, bargroupgap=0.05)
    return finish(figure, title, figure.layout.height)


def message_sizes(table: pd.DataFrame, title: str) -> go.Figure:
    """Draw calls and bytes by message size, a row per model. `table`: `model`, `size`, `calls`, `payload_bytes`."""
    models = [*table["model"].drop_duplicates()]
    height = 60 + 170 * len(models)
    names = [label(f"{model}: {what}") for model in models for what in ("calls", "bytes")]
    figure = make_subplots(
        rows=len(models), cols=2, subplot_titles=names, vertical_spacing=76 / height, horizontal_spacing=0.09
    )
    table = table.loc[table["size"] > 0]
    table = table.assign(exponent=np.log2(size_bins(table["size"].to_numpy())[0]).astype(int))
    low, high = min(table["exponent"], default=0), max(table["exponent"], default=0)
    for row, model in enumerate(models, start=1):
        part = table.loc[table["model"] == model]
        bins = part.groupby("exponent", as_index=False).agg(
            calls=("calls", "sum"), payload_bytes=("payload_bytes", "sum"), kinds=("size", "nunique")
        )
        scale = bytes_scale(bins["payload_bytes"])
        hover = [
            f"{format_power_of_two(size_bin.exponent)} to below {format_power_of_two(size_bin.exponent + 1)}<br>"
            f"{format_count(size_bin.calls)} calls of "
            f"{format_count(size_bin.kinds)} sizes<br>{format_bytes(size_bin.payload_bytes)}"
            for size_bin in rows_of(bins)
        ]
        for column, values in ((1, bins["calls"]), (2, scale.axis(bins["payload_bytes"]))):
            figure.add_trace(
                go.Bar(
                    x=bins["exponent"] + 0.5,
                    y=values,
                    width=0.86,
                    marker=paint("all_gather"),
                    showlegend=False,
                    customdata=hover,
                    hovertemplate="%{customdata}<extra></extra>",
                ),
                row=row,
                col=column,
            )
        figure.update_yaxes(title_text="calls", row=row, col=1, rangemode="tozero")
        figure.update_yaxes(title_text=scale.unit, row=row, col=2, rangemode="tozero")
    step = max(1, math.ceil((high + 1 - low) / 6))
    edges = [*range(low, high + 2, step)]
    figure.update_xaxes(
        tickvals=edges, ticktext=[format_power_of_two(edge) for edge in edges], range=[low - 0.2, high + 1.2]
    )
    return finish(_headed(figure), title, height)


def by_length(table: pd.DataFrame, title: str, axis: str) -> go.Figure:
    """Draw bytes by sequence length: recorded as lines, expected as rings, the closed form dotted.

    `table`: `name` (a line), `sequence`, `recorded_bytes`, `exact_bytes`, `closed_form_bytes` (may be missing).
    """
    return _curves(table, "sequence", title, axis, "tokens of a sequence")


def by_ranks(table: pd.DataFrame, title: str, axis: str) -> go.Figure:
    """Draw the same by number of ranks (`ranks`), with a panel for each model."""
    return _curves(table, "ranks", title, axis, "ranks")


def times_of(table: pd.DataFrame, title: str) -> go.Figure:
    """Draw predicted times. `table`: `model`, `name`, `op`, `time_us`."""

    def draw(figure: go.Figure, part: pd.DataFrame, place: dict[str, int]) -> None:
        sums = part.groupby("name", sort=False)["time_us"].sum() * 1e3
        scale = time_scale(sums)
        for op in in_order(part["op"]):
            rows = part.loc[part["op"] == op]
            hover = [f"{label(op)}<br>{format_duration(value * 1e3)}" for value in rows["time_us"]]
            figure.add_trace(_bar(rows, op, scale.axis(rows["time_us"] * 1e3), hover=hover), **place)
        figure.add_trace(stack_totals(sums, scale.axis(sums), formatter=format_duration), **place)
        figure.update_xaxes(title_text=f"time of a step, {scale.unit}", range=[0, 1.25 * scale.reach(sums)], **place)

    return _stacked(table, draw, title)


# ---- panels and bars -------------------------------------------------------------------------------------------------


def _curves(table: pd.DataFrame, column: str, title: str, axis: str, across: str) -> go.Figure:
    table = table if "model" in table else table.assign(model="")
    scale = bytes_scale(table["recorded_bytes"])
    lines = [*table["name"].drop_duplicates()]

    def draw(figure: go.Figure, part: pd.DataFrame, place: dict[str, int]) -> None:
        for name, rows in part.groupby("name", sort=False):
            colour = _LINES[lines.index(name) % len(_LINES)]
            shown = {"x": rows[column], "legendgroup": label(name), "hovertemplate": "%{customdata}<extra></extra>"}
            for what, mode, look in (
                ("closed_form_bytes", "lines", {"line": {"color": colour, "dash": "dot", "width": 1.5}}),
                ("recorded_bytes", "lines+markers", {"line": {"color": colour}, "marker": {"size": 6}}),
                ("exact_bytes", "markers", {"marker": {"color": colour, "size": 12, "symbol": "circle-open"}}),
            ):
                words = what.removesuffix("_bytes").replace("_", " ")
                hover = [f"{label(name)}, {words}<br>{format_bytes(value)}" for value in rows[what]]
                main = what == "recorded_bytes"
                figure.add_trace(
                    go.Scatter(
                        y=scale.axis(rows[what]), mode=mode, name=label(name) if main else "", showlegend=main,
                        customdata=hover, **shown, **look,
                    ),
                    **place,
                )  # fmt: skip
        ticks = sorted({int(value) for value in part[column]})
        figure.update_xaxes(
            type="log", tickvals=ticks, ticktext=[format_count(tick) for tick in ticks], title_text=across, **place
        )
        figure.update_yaxes(title_text=f"{axis}, {scale.unit}", rangemode="tozero", **place)

    figure = _panels(table, draw, bars=9, upright=True)
    return finish(figure, title, figure.layout.height)


Draw = Callable[[go.Figure, pd.DataFrame, dict[str, int]], None]


def _panels(table: pd.DataFrame, draw: Draw, *, bars: int, upright: bool = False) -> go.Figure:
    """Draw a panel for each model, two in a row. `upright`: without horizontal bars."""
    models = [*table["model"].drop_duplicates()]
    columns = max(1, min(2, len(models)))
    rows = max(1, math.ceil(len(models) / columns))
    panel = _ROOM + _BAR * max(bars, 3)
    height = 50 + rows * panel
    figure = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[label(model) for model in models],
        vertical_spacing=_ROOM / height if rows > 1 else 0,
        horizontal_spacing=0.12,
    )
    for number, model in enumerate(models):
        place = {"row": number // columns + 1, "col": number % columns + 1}
        part = table.loc[table["model"] == model]
        draw(figure, part, place)
        if not upright:
            names = [label(name) for name in part["name"].drop_duplicates()]
            figure.update_yaxes(
                categoryorder="array",
                categoryarray=names,
                range=[len(names) - 0.5, -0.5],
                showgrid=False,
                type="category",
                **place,
            )
    show_legend_once(figure)
    figure.update_layout(height=height)
    return _headed(figure)


def _headed(figure: go.Figure) -> go.Figure:
    """Make space for the panels' titles: the page removes the figure's own title and its margin."""
    figure.update_annotations(font={"size": 13}, yshift=4)
    figure.update_layout(margin={"t": 36})
    return figure


def _bar(part: pd.DataFrame, name: str, x: Sequence[Any] | pd.Series[Any], **labels: Any) -> go.Bar:
    hover = labels.pop("hover")
    text = {"text": labels["text"], "textposition": "inside", "insidetextanchor": "middle"} if "text" in labels else {}
    return go.Bar(
        orientation="h",
        y=[label(scheme) for scheme in part["name"]],
        x=x,
        name=label(name),
        legendgroup=label(name),
        marker=paint(name),
        customdata=hover,
        hovertemplate="%{y}<br>%{customdata}<extra></extra>",
        **text,
    )


def _stacked(table: pd.DataFrame, draw: Draw, title: str) -> go.Figure:
    """Draw a panel for each model, with a stack for each name."""
    figure = _panels(table, draw, bars=int(table.groupby("model")["name"].nunique().max()))
    figure.update_layout(barmode="stack")
    return finish(figure, title, figure.layout.height)
