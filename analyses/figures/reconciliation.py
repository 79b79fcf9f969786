"""Measured against predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pandas as pd
import plotly.graph_objects as go

from commtrace.analyses.engine import rows_of
from commtrace.formatting import format_bytes, format_count, format_signed

from .style import (
    CLOSED_FORM,
    GREY,
    LESS,
    MORE,
    UNEXPLAINED,
    bytes_scale,
    finish,
    in_order,
    label,
    paint,
    words_places,
    wrapped,
)

KINDS: Final = ("closed form", "cause", "unexplained", "measured")
"""What a bar of a waterfall is."""


def waterfall(table: pd.DataFrame) -> go.Figure:
    """From the closed form to the measured volume of a step of one rank, a bar per cause of difference.

    `table`: `waterfall`, its rows from the closed form to the measured volume.
    """
    return _drawn(table, [""] * len(table), "From the closed form to what was measured")


def waterfall_by_role(table: pd.DataFrame) -> go.Figure:
    """The same for each parallel dimension, one behind the other.

    `table`: `waterfall_by_role`.
    """
    return _drawn(table, [str(role) for role in table["role"]], "The same, dimension by dimension")


def _drawn(table: pd.DataFrame, roles: Sequence[str], title: str) -> go.Figure:
    """`roles`: what each bar belongs to; sums begin anew with each."""
    of = pd.Series(roles, index=table.index, dtype=object)
    total = table["kind"].isin(["closed form", "measured"])
    # A total stands on the ground, a cause on the sum of what is before it.
    running = table["bytes"].where(table["kind"] != "measured", 0).groupby(of, sort=False).cumsum()
    top = running.where(~total, table["bytes"])
    base = (top - table["bytes"]).where(~total, 0)
    scale = bytes_scale([*top, *base])
    words = [
        format_bytes(value) if all_ else format_signed(value, format_bytes)
        for value, all_ in zip(table["bytes"], total, strict=True)
    ]
    labels = [f"{role}: {name}" if role else str(name) for role, name in zip(roles, table["label"], strict=True)]
    told = zip(labels, words, table["bytes"], strict=True)
    figure = go.Figure(
        go.Bar(
            orientation="h",
            # By number, so that two causes of one name stay two bars.
            y=list(range(len(table))),
            base=scale.axis(base),
            x=scale.axis(table["bytes"]),
            width=0.44,
            marker={
                "color": [_colour(str(row.kind), row.bytes) for row in rows_of(table)],
                "pattern": {"shape": ["/" if kind == "unexplained" else "" for kind in table["kind"]]},
            },
            text=words,
            textposition=words_places(table["bytes"], top),
            insidetextanchor="end",
            textangle=0,
            cliponaxis=False,
            customdata=[[wrapped(name), word, format_count(float(value))] for name, word, value in told],
            hovertemplate="%{customdata[0]}<br>%{customdata[1]}<br>%{customdata[2]} bytes<extra></extra>",
        )
    )
    _connect(figure, scale.axis(top), [*table["kind"]])
    for number, name in enumerate(labels):
        # Above its bar and not beside it: a cause is a sentence.
        figure.add_annotation(
            text=wrapped(name, 52, 2),
            align="left",
            x=0,
            xref="paper",
            xanchor="left",
            y=number - 0.25,
            yanchor="bottom",
            showarrow=False,
        )
    ends = [value for value in [0.0, *scale.axis(top), *scale.axis(base)] if value is not None]
    room = 0.24 * (max(ends) - min(ends) or 1)
    figure.update_xaxes(
        title_text=f"bytes a rank sends in a step, at least, {scale.unit}",
        range=[min(ends) - room * (min(ends) < 0), max(ends) + room],
    )
    figure.update_yaxes(showticklabels=False, range=[len(table) - 0.6, -0.75], showgrid=False, zeroline=False)
    return finish(figure, title, 120 + 60 * len(table))


def _connect(figure: go.Figure, ends: Sequence[float | None], kinds: Sequence[str]) -> None:
    """Thin lines from where a bar ends to where the next one begins."""
    for number, end in enumerate(ends[:-1]):
        if kinds[number] == "measured":
            continue
        line = {"width": 1, "color": GREY}
        figure.add_shape(type="line", x0=end, x1=end, y0=number, y1=number + 1, line=line, layer="below")


def _colour(kind: str, value: float) -> str:
    if kind == "unexplained":
        return UNEXPLAINED
    return CLOSED_FORM if kind != "cause" else MORE if value >= 0 else LESS


def expected_and_measured(table: pd.DataFrame) -> go.Figure:
    """Expected and measured payload of a training step by operation, mean over ranks and steps.

    `table`: `reconciliation`.
    """
    training = table.loc[table["step"] >= 0]
    cells = max(1, len(training[["rank", "step"]].drop_duplicates()))
    sums = (
        training.groupby("op")[["expected_bytes", "measured_bytes", "expected_calls", "measured_calls"]].sum() / cells
    )
    operations = in_order(sums.index)
    volumes = [*sums["expected_bytes"], *sums["measured_bytes"]]
    scale = bytes_scale(volumes)
    figure = go.Figure()
    for what, opacity in (("expected", 0.4), ("measured", 1.0)):
        for op in operations:
            volume, calls = float(sums[f"{what}_bytes"][op]), float(sums[f"{what}_calls"][op])
            figure.add_trace(
                go.Bar(
                    orientation="h",
                    y=[label(op)],
                    x=scale.axis([volume]),
                    offsetgroup=what,
                    marker={**paint(op), "opacity": opacity},
                    showlegend=False,
                    text=[format_bytes(volume)],
                    textposition="outside",
                    textangle=0,
                    cliponaxis=False,
                    customdata=[[label(op), what, format_bytes(volume), format_count(calls)]],
                    hovertemplate="%{customdata[0]}, %{customdata[1]}<br>payload %{customdata[2]}"
                    "<br>%{customdata[3]} calls<extra></extra>",
                )
            )
        # What pale and full mean, in the legend: a bar that is nowhere.
        figure.add_trace(
            go.Bar(x=[None], y=[None], name=what, offsetgroup=what, marker={"color": CLOSED_FORM}, opacity=opacity)
        )
    figure.update_xaxes(title_text=f"payload per rank and step, {scale.unit}", range=[0, 1.3 * scale.reach(volumes)])
    figure.update_yaxes(categoryarray=[label(op) for op in operations], autorange="reversed", showgrid=False)
    figure.update_layout(barmode="group", bargap=0.25, bargroupgap=0.06)
    return finish(figure, "Expected and measured, by operation", 130 + 58 * len(operations))
