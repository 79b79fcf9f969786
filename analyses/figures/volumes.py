"""How much is communicated, by operation and parallel dimension."""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from commtrace.analyses.report.units import count, share, size

from .style import MARK, Scale, bytes_scale, finish, in_order, label, paint

ROW = 30
"""Height of a bar and what is between it and the next, px."""


def volume(table: pd.DataFrame) -> go.Figure:
    """Payload by operation, with its share and the wire bytes as a mark; below, by parallel dimension.

    `table`: `volume_by_role_and_operation`.
    """
    operations = _by_operation(table)
    roles = table.groupby("role")["payload_bytes"].sum().sort_values(ascending=False)
    scale = bytes_scale([*operations["payload_bytes"], *operations["wire_bytes"], *roles])
    rows = [len(operations), len(roles)]
    height = ROW * sum(rows) + 190
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, row_heights=[max(number, 1) for number in rows], vertical_spacing=42 / height
    )
    for row in operations.itertuples(index=False):
        _operation(figure, row, scale)
    _wire(figure, operations, scale)
    for op in in_order(table["op"]):
        _in_roles(figure, op, table.loc[table["op"] == op], scale)
    _sums(figure, roles, scale)
    most = max(scale.axis([0.0, *operations["payload_bytes"], *operations["wire_bytes"].fillna(0), *roles]), default=0)
    figure.update_xaxes(range=[0, 1.3 * (most or 1)])
    figure.update_xaxes(title_text=f"payload, {scale.unit}, sum over the ranks seen", row=2, col=1)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_layout(barmode="stack")
    return finish(figure, "Volume by operation and parallel dimension", height)


def _by_operation(table: pd.DataFrame) -> pd.DataFrame:
    sums = table.groupby("op", as_index=False).agg(
        calls=("calls", "sum"),
        payload_bytes=("payload_bytes", "sum"),
        # Not known for a part of the calls is not known for the operation.
        wire_bytes=("wire_bytes", lambda wire: wire.sum(skipna=False)),
    )
    total = sums["payload_bytes"].sum()
    sums["share"] = sums["payload_bytes"] / total if total else float("nan")
    return sums.sort_values(["payload_bytes", "calls"], ascending=False, kind="stable")


def _operation(figure: go.Figure, row: Any, scale: Scale) -> None:
    op = str(row.op)
    figure.add_trace(
        go.Bar(
            y=[label(op)],
            x=scale.axis([row.payload_bytes]),
            orientation="h",
            name=label(op),
            marker=paint(op),
            legendgroup=op,
            text=[f"{size(row.payload_bytes)} · {share(row.share)}"],
            textposition="outside",
            cliponaxis=False,
            customdata=[[size(row.payload_bytes), size(row.wire_bytes), count(row.calls)]],
            hovertemplate="%{y}<br>payload %{customdata[0]}<br>wire, at least %{customdata[1]}"
            "<br>%{customdata[2]} calls<extra></extra>",
        ),
        row=1,
        col=1,
    )


def _wire(figure: go.Figure, operations: pd.DataFrame, scale: Scale) -> None:
    # At the left edge a mark would hide the words of a bar too short to be seen.
    some = operations.loc[operations["wire_bytes"] > operations["payload_bytes"].max() / 200]
    figure.add_trace(
        go.Scatter(
            x=scale.axis(some["wire_bytes"]),
            y=[label(op) for op in some["op"]],
            mode="markers",
            marker=MARK,
            name="wire bytes, at least",
            hoverinfo="skip",
        ),
        row=1,
        col=1,
    )


def _in_roles(figure: go.Figure, op: str, part: pd.DataFrame, scale: Scale) -> None:
    figure.add_trace(
        go.Bar(
            y=[label(role) for role in part["role"]],
            x=scale.axis(part["payload_bytes"]),
            orientation="h",
            name=label(op),
            marker=paint(op),
            legendgroup=op,
            showlegend=False,
            customdata=[[size(payload), label(op)] for payload in part["payload_bytes"]],
            hovertemplate="%{y}: %{customdata[1]}<br>payload %{customdata[0]}<extra></extra>",
        ),
        row=2,
        col=1,
    )


def _sums(figure: go.Figure, roles: pd.Series[int], scale: Scale) -> None:
    figure.add_trace(
        go.Scatter(
            x=scale.axis(roles),
            y=[label(role) for role in roles.index],
            mode="text",
            text=[f" {size(payload)}" for payload in roles],
            textposition="middle right",
            cliponaxis=False,
            hoverinfo="skip",
            showlegend=False,
        ),
        row=2,
        col=1,
    )
