"""Figures of the volume: by operation and parallel dimension, and by step, with the host time."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from commtrace.analyses.grouping import rows_of
from commtrace.formatting import format_bytes, format_count, format_duration, format_share, is_known

from . import style
from .style import bytes_scale, finish, horizontal_bars, hover_texts, in_order, label, operation_style

ROW_HEIGHT: Final = 38
"""Height of a bar and the space to the next one, px."""

MAX_STEPS: Final = 400
"""Maximum number of steps drawn one by one. If there are more, neighbours are drawn as their mean."""

# Measure: its name and its line. Lines may overlap, so they differ by more than their colours.
_TIMES: Final = {
    "to_completion": ("from the call to its end", {"color": "#AA4465", "dash": "solid", "width": 2}),
    "in_call": ("inside the call", {"color": "#44AA99", "dash": "dot", "width": 2.5}),
    "waiting": ("waiting for the end", {"color": "#B8A13B", "dash": "dash", "width": 2}),
}


def volume(table: pd.DataFrame) -> go.Figure:
    """Draw payload, share and wire bytes by operation and by dimension, from `volume_by_role_and_operation`."""
    # What is not known of an imported run is not drawn: neither as 0, nor as a sum that lacks a part.
    unknown = table[table["payload_bytes"].isna()]
    operations = _by_operation(table[~table["op"].isin(unknown["op"])], has_all=not len(unknown))
    table = table[~table["role"].isin(unknown["role"])]
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
    figure.add_trace(style.stack_totals(roles, scale.axis(roles), [*range(len(roles))]), row=2, col=1)
    figure.update_xaxes(range=[0, 1.3 * scale.reach([*operations["wire_bytes"], *roles])])
    figure.update_xaxes(title_text=f"payload, {scale.unit}, sum over the recorded ranks", row=2, col=1)
    for row, names in enumerate((operations["op"], roles.index), start=1):
        figure.update_yaxes(**style.numbered_rows(names), row=row, col=1)
    figure.update_layout(barmode="stack")
    return finish(figure, "Volume by operation and parallel dimension", height)


def _by_operation(table: pd.DataFrame, *, has_all: bool) -> pd.DataFrame:
    """Return payload, wire bytes and share of operations; without shares if the table does not have all payloads."""
    # The wire bytes of an operation are not known if those of any dimension are not.
    sums = table.groupby("op", as_index=False).agg(
        calls=("calls", "sum"),
        payload_bytes=("payload_bytes", "sum"),
        wire_bytes=("wire_bytes", lambda wire: wire.sum(skipna=False)),
    )
    total = sums["payload_bytes"].sum()
    sums["share"] = sums["payload_bytes"] / total if total and has_all else float("nan")
    return sums.sort_values(["payload_bytes", "calls"], ascending=False, kind="stable")


def _draw_operations(figure: go.Figure, operations: pd.DataFrame, longest: float, scale: style.Scale) -> None:
    positions = style.text_positions(operations["payload_bytes"], [longest])
    for number, (row, position) in enumerate(zip(rows_of(operations), positions, strict=True)):
        payload, wire = format_bytes(row.payload_bytes), format_bytes(row.wire_bytes)
        bar = horizontal_bars(
            [number - 0.09],
            scale.axis([row.payload_bytes]),
            [f"{label(row.op)}<br>payload {payload}<br>wire (min) {wire}<br>{format_count(row.calls)} calls"],
            text=[payload + (f" · {format_share(row.share)}" if is_known(row.share) else "")],
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
        marker={"color": style.GREY},
        name="wire (min)",
        hoverinfo="skip",
        row=1,
        col=1,
    )


def steps(table: pd.DataFrame) -> go.Figure:
    """Draw payload by operation and host time of each training step, per rank, from `steps_by_operation`."""
    table, width = _averaged(table.loc[table["step"] >= 0])
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06)
    volumes = table.pivot_table(index="step", columns="op", values="payload_bytes_per_rank", aggfunc="sum")
    scale = bytes_scale(volumes.sum(axis=1))
    for op in in_order(table["op"]):
        part = volumes[op].dropna()
        bars = go.Bar(
            x=part.index + (width - 1) / 2,
            y=scale.axis(part),
            width=width * (0.8 if len(volumes) <= 60 else 1),
            **operation_style(op),
            **hover_texts(
                f"{label(op)}<br>{_steps(step, width)}<br>{format_bytes(size)}" for step, size in part.items()
            ),
        )
        figure.add_trace(bars.update(marker_line_width=0), row=1, col=1)
    _draw_host_time(figure, table, width)
    figure.update_yaxes(title_text=f"payload per rank, {scale.unit}", rangemode="tozero", row=1, col=1)
    figure.update_xaxes(title_text="training step" + (f" (means of {width})" if width > 1 else ""), row=2, col=1)
    if len(volumes) <= 20 and width == 1:
        figure.update_xaxes(dtick=1)
    figure.update_layout(barmode="stack", bargap=0.2)
    return finish(figure, "Volume and time of each step", 480)


def _draw_host_time(figure: go.Figure, table: pd.DataFrame, width: int) -> None:
    columns = [f"{measure}_ns_per_rank" for measure in _TIMES]
    # min_count: a step in which no time is known has a missing sum, not 0.
    times = table.groupby("step")[columns].sum(min_count=1)
    scale = style.time_scale(times.to_numpy().ravel())
    for (name, line), column in zip(_TIMES.values(), columns, strict=True):
        if times[column].notna().any():
            figure.add_scatter(
                x=times.index + (width - 1) / 2,
                y=scale.axis(times[column]),
                mode="lines+markers" if len(times) <= 60 else "lines",
                line=line,
                name=name,
                **hover_texts(
                    f"{name}<br>{_steps(step, width)}<br>{format_duration(time)}"
                    for step, time in times[column].items()
                ),
                row=2,
                col=1,
            )
    figure.update_yaxes(title_text=f"host time per rank, {scale.unit}", rangemode="tozero", row=2, col=1)


def _averaged(training: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Return means of neighbouring steps if there are more than MAX_STEPS, and the number of steps per mean."""
    if not len(training):
        return training, 1
    first, last = int(training["step"].min()), int(training["step"].max())
    width = -(-(last - first + 1) // MAX_STEPS)
    if width == 1:
        return training, 1
    numbers = (training["step"] - first) // width * width + first
    # A step without the operation counts 0; the last mean may be of fewer steps.
    present = training.groupby(numbers)["step"].nunique()
    values = [column for column in training.columns if column not in ("step", "op")]
    sums = training.assign(step=numbers).groupby(["step", "op"], as_index=False)[values].sum(min_count=1)
    sums[values] = sums[values].div(sums["step"].map(present).astype(float), axis=0)
    return sums, width


def _steps(first: Any, width: int) -> str:
    return f"step {int(np.rint(first))}" if width == 1 else f"mean of steps {int(first)} to {int(first) + width - 1}"
