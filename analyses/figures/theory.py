"""Measured against predicted."""

from __future__ import annotations

from typing import Final

import pandas as pd
import plotly.graph_objects as go

from commtrace.analyses.report.units import count, size

from .style import CLOSED_FORM, GREY, LESS, MORE, UNEXPLAINED, bytes_scale, finish, in_order, label, paint

KINDS: Final = ("closed form", "cause", "unexplained", "measured")
"""What a bar of a waterfall is."""


def waterfall(table: pd.DataFrame) -> go.Figure:
    """From the closed form to the measured volume of a step of one rank, a bar per cause of difference.

    `table`: `waterfall`, its rows from the closed form to the measured volume.
    """
    total = table["kind"].isin(["closed form", "measured"])
    # The sum so far; a total stands on the ground, and says itself what the sum is.
    steps = table["bytes"].where(~total | (table["kind"] == "closed form"), 0).cumsum()
    top = steps.where(table["kind"] != "measured", table["bytes"])
    base = (top - table["bytes"]).where(~total, 0)
    scale = bytes_scale([*top, *base])
    colours = [_colour(str(kind), float(value)) for kind, value in zip(table["kind"], table["bytes"], strict=True)]
    words = [size(value) if all_ else _signed(value) for value, all_ in zip(table["bytes"], total, strict=True)]
    names = [label(name, 60) for name in table["label"]]
    figure = go.Figure(
        go.Bar(
            orientation="h",
            # Numbered, so that two causes of one name stay two bars.
            y=list(range(len(table))),
            base=scale.axis(base),
            x=scale.axis(table["bytes"]),
            marker={
                "color": colours,
                "pattern": {"shape": ["/" if kind == "unexplained" else "" for kind in table["kind"]]},
            },
            text=words,
            textposition="outside",
            cliponaxis=False,
            customdata=[
                [name, word, count(float(value))]
                for name, word, value in zip(names, words, table["bytes"], strict=True)
            ],
            hovertemplate="%{customdata[0]}<br>%{customdata[1]}<br>%{customdata[2]} bytes<extra></extra>",
        )
    )
    ends = scale.axis(top)
    for number in range(len(ends) - 1):
        figure.add_shape(
            type="line", x0=ends[number], x1=ends[number], y0=number, y1=number + 1, line={"width": 1, "color": GREY},
            layer="below",
        )  # fmt: skip
    most = max([abs(value) for value in [*ends, *scale.axis(base)] if value is not None], default=1.0)
    least = min([value for value in [*ends, *scale.axis(base)] if value is not None], default=0.0)
    figure.update_xaxes(
        title_text=f"bytes a rank sends in a training step, at least, {scale.unit}",
        range=[min(1.25 * least, 0), 1.25 * (most or 1)],
    )
    figure.update_yaxes(
        tickvals=list(range(len(names))), ticktext=names, range=[len(names) - 0.5, -0.5], showgrid=False, zeroline=False
    )
    figure.update_layout(bargap=0.35)
    return finish(figure, "From the closed form to what was measured", 120 + 36 * len(names))


def _colour(kind: str, value: float) -> str:
    if kind == "unexplained":
        return UNEXPLAINED
    return CLOSED_FORM if kind != "cause" else MORE if value >= 0 else LESS


def _signed(value: float) -> str:
    return f"+{size(value)}" if value > 0 else f"-{size(-value)}" if value < 0 else "±0"


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
    scale = bytes_scale(sums[["expected_bytes", "measured_bytes"]].to_numpy().ravel())
    figure = go.Figure()
    for what, shade in (("expected", {"opacity": 0.4}), ("measured", {})):
        for op in operations:
            row = sums.loc[op]
            figure.add_trace(
                go.Bar(
                    orientation="h",
                    y=[[label(op)], [what]],
                    x=scale.axis([row[f"{what}_bytes"]]),
                    marker={**paint(op), **shade},
                    showlegend=False,
                    text=[size(row[f"{what}_bytes"])],
                    textposition="outside",
                    cliponaxis=False,
                    customdata=[[label(op), what, size(row[f"{what}_bytes"]), count(row[f"{what}_calls"])]],
                    hovertemplate="%{customdata[0]}, %{customdata[1]}<br>payload %{customdata[2]}"
                    "<br>%{customdata[3]} calls<extra></extra>",
                )
            )
    most = max(scale.axis([0.0, *sums["expected_bytes"], *sums["measured_bytes"]]), key=lambda value: value or 0.0)
    figure.update_xaxes(title_text=f"payload per rank and training step, {scale.unit}", range=[0, 1.2 * (most or 1)])
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_layout(barmode="overlay", bargap=0.2)
    return finish(figure, "Expected and measured, by operation", 130 + 52 * len(operations))
