"""Figures that compare runs.

They are figures 7, 8, 10, 11 and 13 of "Demystifying the Communication Characteristics for Distributed Transformer
Models" (Anthony et al., 2024). Figure 12, tensor parallelism by operation, is drawn as figure 8 is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from commtrace.analyses.comparison import STEP, WHOLE
from commtrace.analyses.fold_engine import rows_of
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
    bytes_scale,
    finish,
    horizontal_bars,
    in_order,
    label,
    operation_style,
    show_legend_once,
    stack_totals,
    text_positions,
)

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
    """Draw the share of each operation in each run's payload, start-up included (the paper's figure 7).

    Args:
        table: `runs_by_operation`.
    """
    rows = table.loc[table["part"] == WHOLE]
    total = rows.groupby("run")["payload_bytes_per_rank"].transform("sum")
    rows = rows.assign(share=(rows["payload_bytes_per_rank"] / total).where(total > 0))
    figure = go.Figure()
    for op in _operations_with_payload(rows):
        of_op = rows.loc[rows["op"] == op]
        bars = _run_bars(
            of_op,
            of_op["share"] * 100,
            [
                f"{_volume_hover(row)}<br>{row.share * 100:.2f} % of the payload of the whole run"
                for row in rows_of(of_op)
            ],
            text=[format_share(value) if value >= 0.04 else "" for value in of_op["share"]],
            text_position="inside",
            text_anchor="middle",
            **operation_style(op),
        )
        figure.add_trace(bars)
    figure.update_xaxes(title_text="share of the payload of the whole run, %", range=[0, 100], ticksuffix=" %")
    return _finish_stacks(figure, table, "Share of each operation", 130 + 40 * table["run"].nunique())


def operation_volumes(table: pd.DataFrame) -> go.Figure:
    """Draw the volume of each operation in each run: whole run (the paper's figure 8), and a training step.

    Args:
        table: `runs_by_operation`.
    """
    height = 190 + 2 * 40 * table["run"].nunique()
    figure = make_subplots(rows=2, cols=1, vertical_spacing=86 / height)
    operations = _operations_with_payload(table)
    for panel, (part, part_text) in enumerate(((WHOLE, "whole run"), (STEP, "one training step")), start=1):
        rows = table.loc[table["part"] == part]
        totals = rows.groupby("run", sort=False)["payload_bytes_per_rank"].sum()
        scale = bytes_scale(totals)
        for op in operations:
            of_op = rows.loc[rows["op"] == op]
            hover = [_volume_hover(row) for row in rows_of(of_op)]
            bars = _run_bars(of_op, scale.axis(of_op["payload_bytes_per_rank"]), hover, **operation_style(op))
            figure.add_trace(bars, row=panel, col=1)
        figure.add_trace(stack_totals(totals, scale.axis(totals)), row=panel, col=1)
        title, reach = f"payload per rank, {part_text}, {scale.unit}", 1.3 * scale.reach(totals)
        figure.update_xaxes(title_text=title, range=[0, reach], row=panel, col=1)
    show_legend_once(figure)
    return _finish_stacks(figure, table, "Volume of each operation", height)


def role_volumes(table: pd.DataFrame) -> go.Figure:
    """Draw the wire bytes of each run by parallel dimension (the paper's figure 11, in total).

    Args:
        table: `runs_by_role`.
    """
    totals = table.groupby("run", sort=False)["wire_bytes_per_rank"].sum()
    scale = bytes_scale(totals)
    figure = go.Figure()
    sending = table.loc[table["wire_bytes_per_rank"] > 0]
    roles = {*sending["role"]}
    for role in [*(role for role in ROLES if role in roles), *sorted(roles - {*ROLES})]:
        rows = sending.loc[sending["role"] == role]
        colour, shape = _ROLE_PAINT.get(role, (GREY, "/"))
        hover = [
            f"{label(row.run)}: {label(role)}<br>{format_bytes(row.wire_bytes_per_rank)} per rank (min)"
            f"<br>{format_bytes(row.payload_bytes_per_rank)} payload"
            for row in rows_of(rows)
        ]
        bars = _run_bars(
            rows,
            scale.axis(rows["wire_bytes_per_rank"]),
            hover,
            name=label(role),
            marker={"color": colour, "pattern": {"shape": shape, "fillmode": "overlay", "size": 6}},
        )
        figure.add_trace(bars)
    figure.add_trace(stack_totals(totals, scale.axis(totals)))
    title = f"wire bytes per rank, whole run (min), {scale.unit}"
    figure.update_xaxes(title_text=title, range=[0, 1.3 * scale.reach(totals)])
    return _finish_stacks(figure, table, "Volume of each parallel dimension", 150 + 40 * table["run"].nunique())


def measured_and_predicted(table: pd.DataFrame) -> go.Figure:
    """Draw the bytes that a rank sends in a training step, measured and by the closed form (the paper's figure 10).

    Args:
        table: `runs_predicted`.
    """
    return _prediction_bars(table, "wire bytes per step (min)", "Measured against predicted")


def predicted_by_role(table: pd.DataFrame) -> go.Figure:
    """Draw the bytes of a step, measured and by the formula of each parallel dimension (the paper's figure 13).

    Args:
        table: `runs_predicted_by_role`.
    """
    names = table["run"].astype(str) + " · " + table["role"].astype(str)
    axis = "bytes of a step (pipeline: all stages)"
    return _prediction_bars(table.assign(run=names), axis, "Measured against predicted, by dimension")


def _prediction_bars(table: pd.DataFrame, axis: str, title: str) -> go.Figure:
    both = [*table["predicted_bytes"], *table["measured_bytes"]]
    scale = bytes_scale(both)
    ratios = (table["measured_bytes"] / table["predicted_bytes"]).where(table["predicted_bytes"] > 0)
    ratio_texts = [f" · {ratio:.2f} x" if pd.notna(ratio) else "" for ratio in ratios]
    figure = go.Figure()
    for kind, name, colour, suffixes in (
        ("predicted", "predicted by the closed form", CLOSED_FORM, [""] * len(table)),
        ("measured", "measured", MORE, ratio_texts),
    ):
        values = table[f"{kind}_bytes"]
        bars = _run_bars(
            table,
            scale.axis(values),
            [
                f"{label(run)}, {kind}<br>{format_count(size)} bytes"
                for run, size in zip(table["run"], values, strict=True)
            ],
            text=[format_bytes(value) + suffix for value, suffix in zip(values, suffixes, strict=True)],
            text_position=text_positions(values, both),
            text_anchor="start",
            name=name,
            marker={"color": colour},
        )
        figure.add_trace(bars)
    figure.update_xaxes(title_text=f"{axis}, {scale.unit}", rangemode="tozero")
    figure.update_yaxes(**_runs_axis(table))
    figure.update_layout(barmode="group", bargap=0.3, bargroupgap=0.08)
    return finish(figure, title, 130 + 58 * len(table))


def _operations_with_payload(table: pd.DataFrame) -> list[str]:
    return in_order(table.loc[table["payload_bytes_per_rank"] > 0, "op"])


def _run_bars(rows: pd.DataFrame, lengths: Any, hover: Sequence[str], **options: Any) -> go.Bar:
    """Return a bar for each row, at its run; the other arguments are those of `horizontal_bars`."""
    return horizontal_bars([label(run) for run in rows["run"]], lengths, hover, **options)


def _volume_hover(row: Any) -> str:
    return f"{label(row.run)}: {label(row.op)}<br>{format_bytes(row.payload_bytes_per_rank)} per rank"


def _runs_axis(table: pd.DataFrame) -> dict[str, Any]:
    """Return an axis with the runs from top to bottom in the order of the table, those without a value too."""
    runs = [label(run) for run in table["run"].drop_duplicates()]
    limits = [len(runs) - 0.5, -0.5]
    return {
        "categoryorder": "array", "categoryarray": runs, "range": limits, "showgrid": False, "type": "category",
    }  # fmt: skip


def _finish_stacks(figure: go.Figure, table: pd.DataFrame, title: str, height: int) -> go.Figure:
    figure.update_yaxes(**_runs_axis(table))
    return finish(figure.update_layout(barmode="stack"), title, height)
