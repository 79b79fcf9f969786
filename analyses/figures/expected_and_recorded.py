"""Figures of the reconciliation: expected and measured calls, and the causes of their differences."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from commtrace.formatting import format_bytes, format_count, format_signed

from . import style
from .style import CLOSED_FORM, bytes_scale, finish, horizontal_bars, in_order, label, text_positions, wrapped


def waterfall(table: pd.DataFrame) -> go.Figure:
    """Draw `waterfall`: from the closed form to the measured bytes of a step of one rank, a bar per cause.

    For `waterfall_by_role`, draw the waterfall of each parallel dimension, one below the other.
    """
    title = "From the closed form to the recorded bytes" + (", by dimension" if "role" in table else "")
    roles = table["role"] if "role" in table else pd.Series("", table.index)
    total = table["kind"].isin(["closed form", "measured"])
    colours = table["kind"].map({"unexplained": style.UNEXPLAINED, "cause": style.MORE}).fillna(CLOSED_FORM)
    colours = colours.mask((table["kind"] == "cause") & (table["bytes"] < 0), style.LESS)
    # A total begins at 0, a cause at the sum of the bars before it, which restarts with each role.
    running = table["bytes"].where(table["kind"] != "measured", 0).groupby(roles, sort=False).cumsum()
    top = running.where(~total, table["bytes"])
    base = (top - table["bytes"]).where(~total, 0)
    scale = bytes_scale([*top, *base])
    texts = [
        format_bytes(size) if is_total else format_signed(size, format_bytes)
        for size, is_total in zip(table["bytes"], total, strict=True)
    ]
    labels = [f"{role}: {name}" if role else str(name) for role, name in zip(roles, table["label"], strict=True)]
    hover = [
        f"{wrapped(name)}<br>{text}<br>{format_count(float(size))} bytes"
        for name, text, size in zip(labels, texts, table["bytes"], strict=True)
    ]
    pattern = {"shape": ["/" if kind == "unexplained" else "" for kind in table["kind"]]}
    bars = horizontal_bars(
        list(range(len(table))),  # by number, so that two causes with the same label stay two bars
        scale.axis(table["bytes"]),
        hover,
        text=texts,
        text_position=text_positions(table["bytes"], top),
        base=scale.axis(base),
        width=0.44,
        marker={"color": [*colours], "pattern": pattern},
    )
    figure = go.Figure(bars)
    for number, (end, kind) in enumerate(zip(scale.axis(top)[:-1], table["kind"][:-1], strict=True)):
        if kind != "measured":  # from the end of the bar to the start of the next one
            line = {"width": 1, "color": style.GREY}
            figure.add_shape(type="line", x0=end, x1=end, y0=number, y1=number + 1, line=line, layer="below")
    # Labels are above their bars: a cause is a sentence, too long for the space beside its bar.
    place = {"align": "left", "x": 0, "xref": "paper", "xanchor": "left", "yanchor": "bottom", "showarrow": False}
    for number, name in enumerate(labels):
        figure.add_annotation(text=wrapped(name, 52, 2), y=number - 0.25, **place)
    ends = [value for value in [0.0, *scale.axis(top), *scale.axis(base)] if value is not None]
    room = 0.24 * (max(ends) - min(ends) or 1)
    figure.update_xaxes(
        title_text=f"wire bytes per step (min), {scale.unit}",
        range=[min(ends) - room * (min(ends) < 0), max(ends) + room],
    )
    figure.update_yaxes(showticklabels=False, range=[len(table) - 0.6, -0.75], showgrid=False, zeroline=False)
    return finish(figure, title, 120 + 60 * len(table))


waterfall_by_role = waterfall


def expected_and_measured(table: pd.DataFrame) -> go.Figure:
    """Draw the payload of a step by operation, from `reconciliation`: means over ranks and training steps."""
    training = table.loc[table["step"] >= 0]
    steps = max(1, len(training[["rank", "step"]].drop_duplicates()))
    columns = ["expected_bytes", "measured_bytes", "expected_calls", "measured_calls"]
    means = training.groupby("op")[columns].sum() / steps
    operations = in_order(means.index)
    volumes = [*means["expected_bytes"], *means["measured_bytes"]]
    scale = bytes_scale(volumes)
    figure = go.Figure()
    for side, name, opacity in (("expected", "expected", 0.4), ("measured", "recorded", 1.0)):
        for op in operations:
            size, calls = float(means[f"{side}_bytes"][op]), float(means[f"{side}_calls"][op])
            bars = horizontal_bars(
                [label(op)],
                scale.axis([size]),
                [f"{label(op)}, {name}<br>payload {format_bytes(size)}<br>{format_count(calls)} calls"],
                text=[format_bytes(size)],
                offsetgroup=side,
                marker={**style.paint(op), "opacity": opacity},
                showlegend=False,
            )
            figure.add_trace(bars)
        # An empty bar explains pale and solid colours in the legend.
        figure.add_trace(
            go.Bar(x=[None], y=[None], name=name, offsetgroup=side, marker={"color": CLOSED_FORM}, opacity=opacity)
        )
    figure.update_xaxes(title_text=f"payload per rank and step, {scale.unit}", range=[0, 1.3 * scale.reach(volumes)])
    figure.update_yaxes(categoryarray=[label(op) for op in operations], autorange="reversed", showgrid=False)
    figure.update_layout(barmode="group", bargap=0.25, bargroupgap=0.06)
    return finish(figure, "Expected and recorded, by operation", 130 + 58 * len(operations))


def differences(table: pd.DataFrame) -> pd.DataFrame:
    """Return what differs in training steps by dimension, operation and cause, from `reconciliation`; largest first."""
    differing = ~table["cause"].isin(["", "expected"])
    rows = table.loc[(table["step"] >= 0) & differing]
    sums = {name: (name, "sum") for name in ("expected_calls", "measured_calls", "difference_bytes")}
    groups = rows.groupby(["role", "op", "cause"], as_index=False).agg(**sums, sites=("sites", "max"))
    return groups.sort_values("difference_bytes", key=lambda difference: difference.abs(), ascending=False)
