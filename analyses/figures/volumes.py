"""How much is communicated, by operation and parallel dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from commtrace.analyses.engine import rows_of
from commtrace.formatting import format_bytes, format_count, format_share

from .style import GREY, Scale, bytes_scale, finish, in_order, label, paint, sums_of_stacks, words_places

ROW = 38
"""Height of a bar and what is between it and the next, px."""


def volume(table: pd.DataFrame) -> go.Figure:
    """Payload by operation, with its share and the wire bytes as a thin bar; below, by parallel dimension.

    `table`: `volume_by_role_and_operation`.
    """
    operations = _by_operation(table)
    roles = table.groupby("role")["payload_bytes"].sum().sort_values(ascending=False)
    scale = bytes_scale([*operations["payload_bytes"], *operations["wire_bytes"], *roles])
    rows = [max(len(operations), 1), max(len(roles), 1)]
    height = ROW * sum(rows) + 160
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=rows, vertical_spacing=36 / height)
    _operations(figure, operations, float(roles.max()), scale)
    for op in in_order(table["op"]):
        _in_roles(figure, op, table.loc[table["op"] == op], [*roles.index], scale)
    figure.add_trace(sums_of_stacks(scale.axis(roles), [*range(len(roles))], map(format_bytes, roles)), row=2, col=1)
    figure.update_xaxes(range=[0, 1.3 * scale.reach([*operations["wire_bytes"], *roles])])
    figure.update_xaxes(title_text=f"payload, {scale.unit}, sum over the ranks seen", row=2, col=1)
    for row, names in enumerate((operations["op"], roles.index), start=1):
        figure.update_yaxes(**_named_rows([*names]), row=row, col=1)
    figure.update_layout(barmode="stack")
    return finish(figure, "Volume by operation and parallel dimension", height)


def _named_rows(names: Sequence[object]) -> dict[str, Any]:
    """A vertical axis on which row 0 is the first."""
    return {
        "tickvals": list(range(len(names))),
        "ticktext": [label(name) for name in names],
        "range": [max(len(names), 1) - 0.5, -0.5],
        "showgrid": False,
        "zeroline": False,
    }


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


def _operations(figure: go.Figure, operations: pd.DataFrame, longest: float, scale: Scale) -> None:
    places = words_places(operations["payload_bytes"], [longest])
    for number, (row, place) in enumerate(zip(rows_of(operations), places, strict=True)):
        figure.add_trace(
            go.Bar(
                y=[number - 0.09],
                x=scale.axis([row.payload_bytes]),
                width=0.5,
                orientation="h",
                name=label(row.op),
                marker=paint(str(row.op)),
                legendgroup=label(row.op),
                text=[f"{format_bytes(row.payload_bytes)} · {format_share(row.share)}"],
                textposition=place,
                insidetextanchor="end",
                textangle=0,
                cliponaxis=False,
                customdata=[
                    [
                        label(row.op),
                        format_bytes(row.payload_bytes),
                        format_bytes(row.wire_bytes),
                        format_count(row.calls),
                    ]
                ],
                hovertemplate="%{customdata[0]}<br>payload %{customdata[1]}<br>wire, at least %{customdata[2]}"
                "<br>%{customdata[3]} calls<extra></extra>",
            ),
            row=1,
            col=1,
        )
    figure.add_trace(
        go.Bar(
            y=[number + 0.27 for number in range(len(operations))],
            x=scale.axis(operations["wire_bytes"]),
            width=0.14,
            orientation="h",
            marker={"color": GREY},
            name="wire bytes, at least",
            hoverinfo="skip",
        ),
        row=1,
        col=1,
    )


def _in_roles(figure: go.Figure, op: str, part: pd.DataFrame, roles: Sequence[str], scale: Scale) -> None:
    figure.add_trace(
        go.Bar(
            y=[roles.index(role) for role in part["role"]],
            x=scale.axis(part["payload_bytes"]),
            width=0.6,
            orientation="h",
            name=label(op),
            marker=paint(op),
            legendgroup=label(op),
            showlegend=False,
            customdata=[
                [label(role), label(op), format_bytes(payload)]
                for role, payload in zip(part["role"], part["payload_bytes"], strict=True)
            ],
            hovertemplate="%{customdata[0]}: %{customdata[1]}<br>payload %{customdata[2]}<extra></extra>",
        ),
        row=2,
        col=1,
    )
