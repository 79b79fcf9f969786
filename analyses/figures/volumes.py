"""Figure of the volume by operation and parallel dimension."""

from __future__ import annotations

from typing import Final

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from commtrace.analyses.fold_engine import rows_of
from commtrace.formatting import format_bytes, format_count, format_share

from .style import (
    GREY,
    Scale,
    bytes_scale,
    finish,
    horizontal_bars,
    in_order,
    label,
    numbered_rows,
    operation_style,
    stack_totals,
    text_positions,
)

ROW_HEIGHT: Final = 38
"""Height of a bar and the space to the next one, px."""


def volume(table: pd.DataFrame) -> go.Figure:
    """Draw the payload by operation with its share and least wire bytes, and below it by parallel dimension.

    Args:
        table: `volume_by_role_and_operation`.
    """
    operations = _by_operation(table)
    roles = table.groupby("role")["payload_bytes"].sum().sort_values(ascending=False)
    scale = bytes_scale([*operations["payload_bytes"], *operations["wire_bytes"], *roles])
    rows = [max(len(operations), 1), max(len(roles), 1)]
    height = ROW_HEIGHT * sum(rows) + 160
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=rows, vertical_spacing=36 / height)
    _draw_operations(figure, operations, float(roles.max()), scale)
    for op in in_order(table["op"]):
        cells = table.loc[table["op"] == op]
        bars = horizontal_bars(
            [roles.index.get_loc(role) for role in cells["role"]],
            scale.axis(cells["payload_bytes"]),
            [f"{label(row.role)}: {label(op)}<br>payload {format_bytes(row.payload_bytes)}" for row in rows_of(cells)],
            width=0.6,
            showlegend=False,
            **operation_style(op),
        )
        figure.add_trace(bars, row=2, col=1)
    figure.add_trace(stack_totals(roles, scale.axis(roles), [*range(len(roles))]), row=2, col=1)
    figure.update_xaxes(range=[0, 1.3 * scale.reach([*operations["wire_bytes"], *roles])])
    figure.update_xaxes(title_text=f"payload, {scale.unit}, sum over the recorded ranks", row=2, col=1)
    for row, names in enumerate((operations["op"], roles.index), start=1):
        figure.update_yaxes(**numbered_rows(names), row=row, col=1)
    figure.update_layout(barmode="stack")
    return finish(figure, "Volume by operation and parallel dimension", height)


def _by_operation(table: pd.DataFrame) -> pd.DataFrame:
    # Wire bytes that are not known for a part of the calls are not known for the operation.
    sums = table.groupby("op", as_index=False).agg(
        calls=("calls", "sum"),
        payload_bytes=("payload_bytes", "sum"),
        wire_bytes=("wire_bytes", lambda wire: wire.sum(skipna=False)),
    )
    total = sums["payload_bytes"].sum()
    sums["share"] = sums["payload_bytes"] / total if total else float("nan")
    return sums.sort_values(["payload_bytes", "calls"], ascending=False, kind="stable")


def _draw_operations(figure: go.Figure, operations: pd.DataFrame, longest: float, scale: Scale) -> None:
    positions = text_positions(operations["payload_bytes"], [longest])
    for number, (row, position) in enumerate(zip(rows_of(operations), positions, strict=True)):
        payload, wire = format_bytes(row.payload_bytes), format_bytes(row.wire_bytes)
        bar = horizontal_bars(
            [number - 0.09],
            scale.axis([row.payload_bytes]),
            [f"{label(row.op)}<br>payload {payload}<br>wire (min) {wire}<br>{format_count(row.calls)} calls"],
            text=[f"{payload} · {format_share(row.share)}"],
            text_position=position,
            width=0.5,
            **operation_style(row.op),
        )
        figure.add_trace(bar, row=1, col=1)
    figure.add_bar(
        y=[number + 0.27 for number in range(len(operations))],
        x=scale.axis(operations["wire_bytes"]),
        width=0.14,
        orientation="h",
        marker={"color": GREY},
        name="wire (min)",
        hoverinfo="skip",
        row=1,
        col=1,
    )
