"""Figures that compare runs: side by side, and of one program on increasing numbers of ranks.

Those of runs side by side are figures 7, 8, 10, 11 and 13 of "Demystifying the Communication Characteristics for
Distributed Transformer Models" (Anthony et al., 2024). Figure 12, tensor parallelism by operation, is drawn like
figure 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from commtrace.analyses.grouping import rows_of
from commtrace.analyses.side_by_side import FULL_RUN, TRAINING_STEP
from commtrace.formatting import format_bytes, format_count, format_duration, format_share
from commtrace.schema import ROLES

from . import style
from .style import BLUE, GREEN, GREY, ORANGE, PINK, SKY, VERMILION, bytes_scale, finish, horizontal_bars, label

# Dimension: colour and pattern.
_ROLE_PAINT: Final = {
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
    """Draw the share of each operation in the payload of each run of `runs_by_operation` (the paper's figure 7)."""
    rows = table.loc[table["part"] == FULL_RUN]
    total = rows.groupby("run")["payload_bytes_per_rank"].transform("sum")
    share = (rows["payload_bytes_per_rank"] / total).where(total > 0)
    hover = [
        f"{text}<br>{value * 100:.2f} % of the payload of the whole run"
        for text, value in zip(_volume_hover(rows, "op"), share, strict=True)
    ]
    text = [format_share(value) if value >= 0.04 else "" for value in share]
    figure = go.Figure(_stack(rows.assign(length=share * 100, hover=hover, text=text), "op", _operations(rows)))
    figure.update_traces(textposition="inside", insidetextanchor="middle", textangle=0, cliponaxis=False)
    figure.update_xaxes(title_text="share of the payload of the whole run, %", range=[0, 100], ticksuffix=" %")
    return _finish_stacks(figure, table, "Share of each operation", 130 + 40 * table["run"].nunique())


def operation_volumes(table: pd.DataFrame) -> go.Figure:
    """Draw the volumes of `runs_by_operation`: of whole runs (the paper's figure 8), and of a training step."""
    height = 190 + 2 * 40 * table["run"].nunique()
    figure = make_subplots(rows=2, cols=1, vertical_spacing=86 / height)
    for panel, (part, part_text) in enumerate(((FULL_RUN, "whole run"), (TRAINING_STEP, "one training step")), start=1):
        rows = table.loc[table["part"] == part]
        hover, axis = [*_volume_hover(rows, "op")], f"payload per rank, {part_text}"
        _draw_volumes(figure, rows.assign(hover=hover), "payload_bytes_per_rank", "op", _operations(table), axis, panel)
    style.show_legend_once(figure)
    return _finish_stacks(figure, table, "Volume of each operation", height)


def role_volumes(table: pd.DataFrame) -> go.Figure:
    """Draw the wire bytes of each run by parallel dimension, from `runs_by_role` (the paper's figure 11, in total)."""
    # Rows that send nothing get no dimension, and so no bar.
    rows = table.assign(role=table["role"].where(table["wire_bytes_per_rank"] > 0))
    hover = [
        f"{text} (min)<br>{format_bytes(payload)} payload"
        for text, payload in zip(_volume_hover(rows, "role", "wire"), rows["payload_bytes_per_rank"], strict=True)
    ]
    roles = {*rows["role"].dropna()}
    paint = {}
    for role in [*(role for role in ROLES if role in roles), *sorted(roles - {*ROLES})]:
        colour, shape = _ROLE_PAINT.get(role, (GREY, "/"))
        pattern = {"shape": shape, "fillmode": "overlay", "size": 6}
        paint[role] = {"name": label(role), "marker": {"color": colour, "pattern": pattern}}
    figure = make_subplots()
    axis = "wire bytes per rank, whole run (min)"
    _draw_volumes(figure, rows.assign(hover=hover), "wire_bytes_per_rank", "role", paint, axis)
    return _finish_stacks(figure, table, "Volume of each parallel dimension", 150 + 40 * table["run"].nunique())


def measured_and_predicted(table: pd.DataFrame) -> go.Figure:
    """Draw the measured and predicted bytes of a rank's step, from `runs_predicted` (the paper's figure 10)."""
    return _prediction_bars(table, "wire bytes per step (min)", "Recorded against the closed form")


def predicted_by_role(table: pd.DataFrame) -> go.Figure:
    """Draw the bytes of a step by dimension, from `runs_predicted_by_role` (the paper's figure 13)."""
    names = table["run"].astype(str) + " · " + table["role"].astype(str)
    axis = "bytes of a step (pipeline: all stages)"
    return _prediction_bars(table.assign(run=names), axis, "Recorded against the closed form, by dimension")


def speedup(table: pd.DataFrame) -> go.Figure:
    """Draw speedup and efficiency of `scaling` against the number of ranks, and ideal scaling."""
    ranks, ideal_speedup = table["ranks"], table["ranks"] / table["ranks"].iloc[0]
    hover = [
        f"{label(row.run)}<br>{row.ranks} ranks<br>{row.speedup:.2f}x, {format_share(row.efficiency)}"
        for row in rows_of(table)
    ]
    dotted = {"mode": "lines", "line": {"color": style.CLOSED_FORM, "dash": "dot"}, "hoverinfo": "skip"}
    markers = {"mode": "lines+markers", "line": {"color": BLUE}, "marker": {"size": 9}, **style.hover_texts(hover)}
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12)
    panels = (
        ("speedup", ideal_speedup, table["speedup"]),
        ("efficiency, %", ideal_speedup * 0 + 100, table["efficiency"] * 100),
    )
    for panel, (title, ideal, measured) in enumerate(panels, start=1):
        options = {"x": ranks, "showlegend": panel == 1, "row": 1, "col": panel}
        figure.add_scatter(y=ideal, name="ideal scaling", **dotted, **options)
        figure.add_scatter(y=measured, name="measured", **markers, **options)
        figure.update_yaxes(title_text=title, rangemode="tozero", row=1, col=panel)
    ticks = sorted(set(ranks))
    figure.update_xaxes(title_text="ranks", type="log", tickvals=ticks, ticktext=[str(tick) for tick in ticks])
    return finish(figure, "Speedup and efficiency", 380)


def step_parts(table: pd.DataFrame) -> go.Figure:
    """Draw where the time of a step goes, a bar per run of `scaling`, means over its ranks."""
    on_device = table["compute_ns"].isna().any()
    parts = {
        **({"whole step": (table["step_ns"], GREY)} if on_device else {"computation": (table["compute_ns"], BLUE)}),
        "communication": (table["blocked_ns"] - table["late_ns"], ORANGE),
        "waiting for late ranks": (table["late_ns"], VERMILION),
    }
    scale = style.time_scale(table["step_ns"])
    runs = [f"{label(row.run)}, {row.ranks} ranks" for row in rows_of(table)]
    figure = go.Figure()
    for name, (values, colour) in parts.items():
        hover = [f"{run}: {name}<br>{format_duration(value)}" for run, value in zip(runs, values, strict=True)]
        figure.add_trace(horizontal_bars(runs, scale.axis(values), hover, name=name, marker={"color": colour}))
    figure.update_xaxes(title_text=f"a training step, {scale.unit}", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    figure.update_layout(barmode="group" if on_device else "stack")
    return finish(figure, "Where the time of a step goes", 150 + 46 * len(table))


def _prediction_bars(table: pd.DataFrame, axis: str, title: str) -> go.Figure:
    both = [*table["predicted_bytes"], *table["measured_bytes"]]
    scale = bytes_scale(both)
    ratios = (table["measured_bytes"] / table["predicted_bytes"]).where(table["predicted_bytes"] > 0)
    ratio_texts = [f" · {ratio:.2f} x" if pd.notna(ratio) else "" for ratio in ratios]
    figure = go.Figure()
    for kind, name, colour, suffixes in (
        ("predicted", "closed form", style.CLOSED_FORM, [""] * len(table)),
        ("measured", "recorded", style.MORE, ratio_texts),
    ):
        runs, values = [label(run) for run in table["run"]], table[f"{kind}_bytes"]
        bars = horizontal_bars(
            runs,
            scale.axis(values),
            [f"{run}, {name}<br>{format_count(size)} bytes" for run, size in zip(runs, values, strict=True)],
            text=[format_bytes(value) + suffix for value, suffix in zip(values, suffixes, strict=True)],
            text_position=style.text_positions(values, both),
            text_anchor="start",
            name=name,
            marker={"color": colour},
        )
        figure.add_trace(bars)
    figure.update_xaxes(title_text=f"{axis}, {scale.unit}", rangemode="tozero")
    figure.update_yaxes(**_runs_axis(table))
    figure.update_layout(barmode="group", bargap=0.3, bargroupgap=0.08)
    return finish(figure, title, 130 + 58 * len(table))


def _operations(table: pd.DataFrame) -> dict[str, dict[str, Any]]:
    operations = style.in_order(table.loc[table["payload_bytes_per_rank"] > 0, "op"])
    return {op: style.operation_style(op) for op in operations}


def _draw_volumes(
    figure: go.Figure, rows: pd.DataFrame, column: str, by: str, paint: Mapping[str, Any], axis: str, panel: int = 1
) -> None:
    """Draw a stack per run of the bytes in `column`, with their sum; the other arguments are those of `_stack`."""
    totals = rows.groupby("run", sort=False)[column].sum()
    scale = bytes_scale(totals)
    stack = _stack(rows.assign(length=rows[column] / scale.divisor), by, paint)
    figure.add_traces([*stack, style.stack_totals(totals, scale.axis(totals))], rows=panel, cols=1)
    reach = 1.3 * scale.reach(totals)
    figure.update_xaxes(title_text=f"{axis}, {scale.unit}", range=[0, reach], row=panel, col=1)


def _stack(rows: pd.DataFrame, by: str, paint: Mapping[str, Mapping[str, Any]]) -> list[go.Bar]:
    """Return bars of the columns `length`, `hover` and `text` (optional), a trace for each value of the column `by`.

    `paint` has these values in order, with the properties of their traces.
    """
    parts = {name: rows.loc[rows[by] == name] for name in paint}
    return [
        horizontal_bars(
            [label(run) for run in part["run"]], [*part["length"]], part["hover"], text=part.get("text"), **paint[name]
        )
        for name, part in parts.items()
    ]


def _volume_hover(rows: pd.DataFrame, by: str, kind: str = "payload") -> list[str]:
    cells = zip(rows["run"], rows[by], rows[f"{kind}_bytes_per_rank"], strict=True)
    return [f"{label(run)}: {label(name)}<br>{format_bytes(size)} per rank" for run, name, size in cells]


def _runs_axis(table: pd.DataFrame) -> dict[str, Any]:
    """Return an axis with the runs from top to bottom in the order of the table, including those without a value."""
    runs = [label(run) for run in table["run"].drop_duplicates()]
    limits = [len(runs) - 0.5, -0.5]
    return {
        "categoryorder": "array", "categoryarray": runs, "range": limits, "showgrid": False, "type": "category",
    }  # fmt: skip


def _finish_stacks(figure: go.Figure, table: pd.DataFrame, title: str, height: int) -> go.Figure:
    figure.update_yaxes(**_runs_axis(table))
    return finish(figure.update_layout(barmode="stack"), title, height)
