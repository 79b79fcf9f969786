"""Figures that compare runs.

They are figures 7, 8, 10, 11 and 13 of "Demystifying the Communication Characteristics for Distributed Transformer
Models" (Anthony et al., 2024). Figure 12, tensor parallelism by operation, is drawn as figure 8 is.
"""

from __future__ import annotations

from typing import Final

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from commtrace.analyses.comparison import STEP, WHOLE
from commtrace.formatting import format_bytes, format_count, format_share
from commtrace.schema import ROLES

from .style import (
    BLUE,
    CLOSED_FORM,
    GREEN,
    GREY,
    MORE,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    Scale,
    bytes_scale,
    finish,
    in_order,
    label,
    paint,
    sums_of_stacks,
    words_places,
)

# Dimension: colour and pattern.
_ROLES: Final = {
    "data": (BLUE, ""),
    "tensor": (ORANGE, ""),
    "pipeline": (SKY, ""),
    "model": (PINK, ""),
    "sequence": (GREEN, ""),
    "context": (GREEN, "/"),
    "expert": (VERMILION, ""),
    "world": (GREY, ""),
}


def operation_shares(table: pd.DataFrame) -> go.Figure:
    """The share of each operation in each run's payload, start-up included (the paper's figure 7).

    `table`: `runs_by_operation`.
    """
    whole = _part(table, WHOLE)
    total = whole.groupby("run")["payload_bytes_per_rank"].transform("sum")
    whole = whole.assign(share=(whole["payload_bytes_per_rank"] / total).where(total > 0))
    figure = go.Figure()
    for op in _that_move_bytes(whole):
        part = whole.loc[whole["op"] == op]
        figure.add_trace(
            go.Bar(
                orientation="h",
                y=[label(run) for run in part["run"]],
                x=part["share"] * 100,
                name=label(op),
                marker=paint(op),
                text=[format_share(value) if value >= 0.04 else "" for value in part["share"]],
                textposition="inside",
                insidetextanchor="middle",
                customdata=_told(part),
                hovertemplate="%{y}: %{customdata[0]}<br>%{x:.2f} % of the payload<br>%{customdata[1]} per rank"
                "<extra></extra>",
            )
        )
    figure.update_xaxes(title_text="share of the payload of the whole run, %", range=[0, 100], ticksuffix=" %")
    _runs_axis(figure, table)
    figure.update_layout(barmode="stack")
    return finish(figure, "Share of each operation", 130 + 40 * table["run"].nunique())


def operation_volumes(table: pd.DataFrame) -> go.Figure:
    """The volume of each operation in each run: of the whole run (the paper's figure 8), and of a training step.

    `table`: `runs_by_operation`.
    """
    runs = table["run"].nunique()
    height = 190 + 2 * 40 * runs
    figure = make_subplots(rows=2, cols=1, vertical_spacing=86 / height)
    operations = _that_move_bytes(table)
    for row, (part, words) in enumerate(((WHOLE, "whole run"), (STEP, "one training step")), start=1):
        rows = _part(table, part)
        totals = rows.groupby("run", sort=False)["payload_bytes_per_rank"].sum()
        scale = bytes_scale(totals)
        for op in operations:
            _stack(figure, op, rows.loc[rows["op"] == op], scale, row)
        figure.add_trace(_sums(totals, scale), row=row, col=1)
        title, room = f"payload per rank, {words}, {scale.unit}", 1.3 * scale.reach(totals)
        figure.update_xaxes(title_text=title, range=[0, room], row=row, col=1)
        _runs_axis(figure, table, row)
    seen: set[str] = set()
    for trace in figure.data:
        trace.showlegend = bool(trace.name) and trace.name not in seen
        seen.add(trace.name)
    figure.update_layout(barmode="stack")
    return finish(figure, "Volume of each operation", height)


def role_volumes(table: pd.DataFrame) -> go.Figure:
    """The volume of each run by parallel dimension (the paper's figure 11, in total).

    `table`: `runs_by_role`.
    """
    totals = table.groupby("run", sort=False)["wire_bytes_per_rank"].sum()
    scale = bytes_scale(totals)
    figure = go.Figure()
    known = [role for role in ROLES if role in set(table["role"])]
    for role in [*known, *sorted({*table["role"]} - {*ROLES})]:
        part = table.loc[(table["role"] == role) & (table["wire_bytes_per_rank"] > 0)]
        if not len(part):
            continue
        colour, shape = _ROLES.get(role, (GREY, "/"))
        figure.add_trace(
            go.Bar(
                orientation="h",
                y=[label(run) for run in part["run"]],
                x=scale.axis(part["wire_bytes_per_rank"]),
                name=label(role),
                marker={"color": colour, "pattern": {"shape": shape, "fillmode": "overlay", "size": 6}},
                customdata=[
                    [label(role), format_bytes(wire), format_bytes(payload)]
                    for wire, payload in zip(part["wire_bytes_per_rank"], part["payload_bytes_per_rank"], strict=True)
                ],
                hovertemplate="%{y}: %{customdata[0]}<br>%{customdata[1]} per rank, at least"
                "<br>%{customdata[2]} payload<extra></extra>",
            )
        )
    figure.add_trace(_sums(totals, scale))
    title = f"bytes a rank sends in the whole run, at least, {scale.unit}"
    figure.update_xaxes(title_text=title, range=[0, 1.3 * scale.reach(totals)])
    _runs_axis(figure, table)
    figure.update_layout(barmode="stack")
    return finish(figure, "Volume of each parallel dimension", 150 + 40 * table["run"].nunique())


def measured_and_predicted(table: pd.DataFrame) -> go.Figure:
    """Bytes that a rank sends in a training step, measured and by the closed form (the paper's figure 10).

    `table`: `runs_predicted`.
    """
    axis = "bytes a rank sends in a step, at least"
    return _against(table, axis, "Measured against predicted")


def predicted_by_role(table: pd.DataFrame) -> go.Figure:
    """Bytes of a training step, measured and by the formula of each parallel dimension (the paper's figure 13).

    `table`: `runs_predicted_by_role`.
    """
    names = [f"{run} · {role}" for run, role in zip(table["run"], table["role"], strict=True)]
    axis = "bytes of a step (pipeline: all stages)"
    return _against(table.assign(run=names), axis, "Measured against predicted, by dimension")


def _against(table: pd.DataFrame, axis: str, title: str) -> go.Figure:
    both = [*table["predicted_bytes"], *table["measured_bytes"]]
    scale = bytes_scale(both)
    ratios = (table["measured_bytes"] / table["predicted_bytes"]).where(table["predicted_bytes"] > 0)
    times = [f" · {ratio:.2f} x" if pd.notna(ratio) else "" for ratio in ratios]
    looks = {"predicted": ("predicted by the closed form", CLOSED_FORM), "measured": ("measured", MORE)}
    figure = go.Figure()
    for what, (name, colour) in looks.items():
        values = table[f"{what}_bytes"]
        figure.add_trace(
            go.Bar(
                orientation="h",
                y=[label(run) for run in table["run"]],
                x=scale.axis(values),
                name=name,
                marker={"color": colour},
                text=[
                    format_bytes(value) + (times[at] if what == "measured" else "") for at, value in enumerate(values)
                ],
                textposition=words_places(values, both),
                insidetextanchor="start",
                textangle=0,
                cliponaxis=False,
                customdata=[[what, format_count(value)] for value in values],
                hovertemplate="%{y}, %{customdata[0]}<br>%{customdata[1]} bytes<extra></extra>",
            )
        )
    figure.update_xaxes(title_text=f"{axis}, {scale.unit}", rangemode="tozero")
    _runs_axis(figure, table)
    figure.update_layout(barmode="group", bargap=0.3, bargroupgap=0.08)
    return finish(figure, title, 130 + 58 * len(table))


def _part(table: pd.DataFrame, part: str) -> pd.DataFrame:
    return table.loc[table["part"] == part]


def _that_move_bytes(table: pd.DataFrame) -> list[str]:
    """Operations with a payload: a barrier has no part in a volume."""
    return in_order(table.loc[table["payload_bytes_per_rank"] > 0, "op"])


def _told(part: pd.DataFrame) -> list[list[str]]:
    return [
        [label(op), format_bytes(value)] for op, value in zip(part["op"], part["payload_bytes_per_rank"], strict=True)
    ]


def _stack(figure: go.Figure, op: str, part: pd.DataFrame, scale: Scale, row: int) -> None:
    figure.add_trace(
        go.Bar(
            orientation="h",
            y=[label(run) for run in part["run"]],
            x=scale.axis(part["payload_bytes_per_rank"]),
            name=label(op),
            legendgroup=label(op),
            marker=paint(op),
            customdata=_told(part),
            hovertemplate="%{y}: %{customdata[0]}<br>%{customdata[1]} per rank<extra></extra>",
        ),
        row=row,
        col=1,
    )


def _sums(totals: pd.Series[float], scale: Scale) -> go.Scatter:
    """Of each run."""
    return sums_of_stacks(scale.axis(totals), [label(run) for run in totals.index], map(format_bytes, totals))


def _runs_axis(figure: go.Figure, table: pd.DataFrame, row: int | None = None) -> None:
    """The runs from top to bottom in the order in which they were given, those without a value too."""
    runs = [label(run) for run in table["run"].drop_duplicates()]
    place = {"row": row, "col": 1} if row is not None else {}
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=runs,
        range=[len(runs) - 0.5, -0.5],
        showgrid=False,
        type="category",
        **place,
    )
