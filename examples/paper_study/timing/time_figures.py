"""Figures of the time part, each from tables of `time_tables`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from commtrace.analyses.figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    bytes_scale,
    finish,
    in_order,
    paint,
    time_scale,
)
from commtrace.formatting import format_bandwidth, format_bytes, format_count, format_duration

from .receives import FIRST, FIRST_STEP, LATER, LATER_FIRST, START
from .trainings import SCHEMES

PARTS: Final[dict[str, tuple[str, str, str]]] = {
    "computing_ns": ("computation", BLUE, ""),
    "overlapped_ns": ("computation, a call in flight", BLUE, "/"),
    "communicating_ns": ("communication", ORANGE, ""),
    "waiting_ns": ("waiting for another rank", VERMILION, ""),
}
COLOURS: Final = dict(
    zip([scheme.name for scheme in SCHEMES], (INK, BLUE, GREEN, ORANGE, VERMILION, PINK, SKY), strict=True)
)
WHENS: Final = {
    START: "before training",
    FIRST: "first step, first micro-batch",
    FIRST_STEP: "first step, others",
    LATER_FIRST: "later steps, first micro-batch",
    LATER: "later steps, others",
}


def step_parts(points: pd.DataFrame) -> go.Figure:
    """Draw the parts of a step, with a panel for each model width. `points`: `time_points` of one sequence length."""
    widths = sorted(points["hidden"].unique())
    figure = _panels([f"hidden size {width}" for width in widths])
    for column, width in enumerate(widths, 1):
        part = points.loc[points["hidden"] == width]
        scale = time_scale(part["step_ns_most"])
        for name, (title, colour, shape) in PARTS.items():
            figure.add_bar(
                orientation="h", y=part["scheme"], x=scale.axis(part[name]), name=title, legendgroup=name,
                showlegend=column == 1, marker={"color": colour, "pattern": {"shape": shape, "fillmode": "overlay"}},
                customdata=[format_duration(value) for value in part[name]],
                hovertemplate=f"%{{y}}: {title}<br>%{{customdata}}<extra></extra>", row=1, col=column,
            )  # fmt: skip
        _whiskers(figure, part, scale.divisor, column)
        figure.update_xaxes(title_text=f"a training step, {scale.unit}", rangemode="tozero", row=1, col=column)
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    figure.update_layout(barmode="stack")
    return finish(figure, "Where the time of a step goes", 206 + 34 * points["scheme"].nunique())


def _whiskers(figure: go.Figure, part: pd.DataFrame, divisor: float, column: int) -> None:
    """Add the fastest and the slowest repeat of each scheme."""
    figure.add_scatter(
        x=part["step_ns"] / divisor, y=part["scheme"], mode="markers", name="median step, fastest and slowest repeat",
        legendgroup="spread", showlegend=column == 1, marker={"color": INK, "symbol": "line-ns-open", "size": 9},
        error_x=_spread(part, "step_ns", divisor), hoverinfo="skip", row=1, col=column,
    )  # fmt: skip


def _spread(table: pd.DataFrame, name: str, divisor: float = 1.0) -> dict[str, Any]:
    return {
        "type": "data", "symmetric": False, "thickness": 1.2, "width": 3,
        "array": (table[f"{name}_most"] - table[name]) / divisor,
        "arrayminus": (table[name] - table[f"{name}_least"]) / divisor,
    }  # fmt: skip


def _panels(titles: Sequence[str], **options: Any) -> go.Figure:
    figure = make_subplots(rows=1, cols=len(titles), subplot_titles=titles, horizontal_spacing=0.13, **options)
    figure.update_annotations(font_size=12, yshift=4)
    # Space for the panels' titles: the page removes the figure's own title and its margin.
    return figure.update_layout(margin={"t": 36})


def operation_times(operations: pd.DataFrame) -> go.Figure:
    """Draw a rank's time in each operation, a panel for each width. `operations`: `time_operations` of a length."""
    widths = sorted(operations["hidden"].unique())
    figure = _panels([f"hidden size {width}" for width in widths])
    for column, width in enumerate(widths, 1):
        part = operations.loc[operations["hidden"] == width]
        scale = time_scale(part.groupby("scheme")["standing_ns"].sum())
        for op in in_order(part["op"].unique()):
            of = part.loc[part["op"] == op]
            figure.add_bar(
                orientation="h", y=of["scheme"], x=scale.axis(of["standing_ns"]), name=op, legendgroup=op,
                showlegend=not any(trace.name == op for trace in figure.data), marker=paint(op),
                customdata=[format_duration(value) for value in of["standing_ns"]],
                hovertemplate=f"%{{y}}: {op}<br>%{{customdata}}<extra></extra>", row=1, col=column,
            )  # fmt: skip
        figure.update_xaxes(title_text=f"a rank and step, {scale.unit}", rangemode="tozero", row=1, col=column)
        order = [scheme.name for scheme in reversed(SCHEMES) if scheme.name in {*part["scheme"]}]
        figure.update_yaxes(categoryorder="array", categoryarray=order, row=1, col=column)
    figure.update_yaxes(showgrid=False, type="category")
    figure.update_layout(barmode="stack")
    return finish(figure, "Time in calls, by operation", 190 + 34 * operations["scheme"].nunique())


def throughput(points: pd.DataFrame, title: str) -> go.Figure:
    """Draw tokens/s of the job and GFLOP/s of a rank by sequence length. `points`: `time_points`."""
    figure = _panels(["tokens a second, all ranks", "GFLOP/s of a rank"])
    for scheme, part in _by_scheme(points):
        for column, (name, write) in enumerate((("tokens_per_s", format_count), ("gflop_per_s", format_bandwidth)), 1):
            figure.add_scatter(
                x=part["seq_length"], y=part[name], name=scheme, legendgroup=scheme, showlegend=column == 1,
                mode="lines+markers", line={"color": COLOURS[scheme], "dash": "dot" if scheme == "DDP" else "solid"},
                error_y=_spread(part, name),
                customdata=[
                    f"{write(round(value, 1))} ({write(round(least, 1))} to {write(round(most, 1))})"
                    for value, least, most in zip(part[name], part[f"{name}_least"], part[f"{name}_most"], strict=True)
                ],
                hovertemplate=f"{scheme}, %{{x}} tokens<br>%{{customdata}}<extra></extra>", row=1, col=column,
            )  # fmt: skip
    _lengths(figure, points)
    figure.update_yaxes(rangemode="tozero")
    return finish(figure, title, 380)


def bandwidths(table: pd.DataFrame, title: str) -> go.Figure:
    """Draw the bus bandwidth of each scheme's largest messages by sequence length. `table`: `time_bandwidths`."""
    operations = in_order(table["op"].unique())
    figure = _panels(operations)
    shown: set[str] = set()
    for column, op in enumerate(operations, 1):
        for scheme, part in _by_scheme(table.loc[table["op"] == op]):
            figure.add_scatter(
                x=part["seq_length"], y=part["busbw_gb_per_s"], name=scheme, legendgroup=scheme,
                showlegend=scheme not in shown, mode="lines+markers", line={"color": COLOURS[scheme]},
                error_y=_spread(part, "busbw_gb_per_s"),
                customdata=[
                    f"{format_bandwidth(value)} GB/s, of {format_bytes(of)}"
                    for value, of in zip(part["busbw_gb_per_s"], part["message_bytes"], strict=True)
                ],
                hovertemplate=f"{scheme}, %{{x}} tokens<br>%{{customdata}}<extra></extra>", row=1, col=column,
            )  # fmt: skip
            shown.add(scheme)
    _lengths(figure, table)
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text="busbw, GB/s", row=1, col=1)
    return finish(figure, title, 380)


def _by_scheme(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    for scheme, part in table.groupby("scheme", sort=False):
        yield str(scheme), part.sort_values("seq_length")


def _lengths(figure: go.Figure, table: pd.DataFrame) -> None:
    ticks = sorted(table["seq_length"].unique())
    figure.update_xaxes(
        title_text="sequence length", type="log", tickvals=ticks, ticktext=[str(tick) for tick in ticks]
    )


def receive_parts(summary: pd.DataFrame) -> go.Figure:
    """Draw waiting and transfer of each kind of receive, cold and later. `summary`: `receives.by_kind`."""
    names = [f"{row.what}, {format_bytes(row.payload_bytes)}<br>{WHENS[str(row.when)]}" for row in summary.itertuples()]
    scale = time_scale(summary["receive_ns"])
    parts = {
        "the sender computes": ("sender_computing_ns", BLUE),
        "the sender stands in calls": ("sender_in_calls_ns", GREY),
        "transfer": ("transfer_ns", ORANGE),
    }
    figure = go.Figure()
    for title, (name, colour) in parts.items():
        figure.add_bar(
            orientation="h", y=names, x=scale.axis(summary[name]), name=title, marker={"color": colour},
            customdata=[format_duration(value) for value in summary[name]],
            hovertemplate=f"%{{y}}: {title}<br>%{{customdata}}<extra></extra>",
        )  # fmt: skip
    figure.add_scatter(
        x=scale.axis(summary["receive_ns"]), y=names, mode="text", showlegend=False, hoverinfo="skip",
        text=[
            f" {format_duration(total)}, of it transfer {format_duration(transfer)}"
            for total, transfer in zip(summary["receive_ns"], summary["transfer_ns"], strict=True)
        ],
        textposition="middle right",
    )  # fmt: skip
    figure.update_xaxes(
        title_text=f"a receive, means, {scale.unit}", range=[0, 1.5 * scale.reach(summary["receive_ns"])]
    )
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    figure.update_layout(barmode="stack")
    return finish(figure, "Receives of a pipeline: waiting for the sender, and the transfer", 150 + 42 * len(summary))


def receive_by_iteration(receives: pd.DataFrame) -> go.Figure:
    """Draw every receive of the last stage, in order. `receives`: `time_receives` of one point and rank, no masks."""
    table = receives.assign(label=_labels(receives)).dropna(subset=["late_ns", "transfer_ns"])
    labels = [*dict.fromkeys(table["label"])]
    means = table.groupby("label")[["late_ns", "transfer_ns"]].mean().reindex(labels)
    scale = time_scale(table["receive_ns"])
    figure = go.Figure()
    for title, name, colour in (("waiting for the sender", "late_ns", VERMILION), ("transfer", "transfer_ns", ORANGE)):
        figure.add_bar(
            x=labels, y=scale.axis(means[name]), name=title, marker={"color": colour},
            customdata=[format_duration(value) for value in means[name]],
            hovertemplate=f"%{{x}}<br>{title}: %{{customdata}}<extra></extra>",
        )  # fmt: skip
    figure.add_scatter(
        x=table["label"], y=scale.axis(table["receive_ns"]), mode="markers", name="each run",
        marker={"color": INK, "size": 4, "opacity": 0.5}, hoverinfo="skip",
    )  # fmt: skip
    figure.update_xaxes(
        title_text="handshake, metadata, then step.micro-batch", type="category", categoryorder="array",
        categoryarray=labels, tickangle=-60, tickfont={"size": 10}, showgrid=False,
    )  # fmt: skip
    figure.update_yaxes(title_text=f"a receive, means, {scale.unit}", rangemode="tozero")
    figure.update_layout(barmode="stack")
    return finish(figure, "Receives of the last stage, one after the other", 420)


def _labels(receives: pd.DataFrame) -> pd.Series[str]:
    numbered = receives["step"].astype(str) + "." + receives["micro_batch"].astype(str)
    return numbered.where(~receives["what"].isin(["handshake", "metadata"]), receives["what"])


SIZE_STYLES: Final[Mapping[str, tuple[str, str, str]]] = {
    "pipeline, first": (VERMILION, "solid", "circle"),
    "pipeline, later": (ORANGE, "solid", "circle"),
    "alone, first, connections made when used": (PINK, "dash", "diamond"),
    "alone, first, connections made at once": (BLUE, "dash", "diamond"),
    "alone, later": (GREEN, "dash", "diamond"),
    "alone, later, into untouched memory": (SKY, "dash", "diamond"),
}


def transfer_by_size(sizes: pd.DataFrame) -> go.Figure:
    """Draw transfers by size, cold and warm, in a pipeline and alone. `sizes`: `receives.transfers_by_size`."""
    figure = go.Figure()
    scale = bytes_scale([1])
    for name, (colour, dash, symbol) in SIZE_STYLES.items():
        part = sizes.loc[sizes["which"] == name].sort_values("payload_bytes")
        if not len(part):
            continue
        figure.add_scatter(
            x=scale.axis(part["payload_bytes"]), y=part["transfer_ns"] / 1e6, name=name, mode="lines+markers",
            line={"color": colour, "dash": dash}, marker={"symbol": symbol, "size": 8},
            error_y=_spread(part, "transfer_ns", 1e6),
            customdata=[
                f"{format_bytes(size)}: {format_duration(ns)}"
                for size, ns in zip(part["payload_bytes"], part["transfer_ns"], strict=True)
            ],
            hovertemplate=f"{name}<br>%{{customdata}}<extra></extra>",
        )  # fmt: skip
    ticks = sorted(sizes["payload_bytes"].unique())
    names = [format_bytes(tick).replace(".00 ", " ").replace(".0 ", " ") for tick in ticks]
    figure.update_xaxes(title_text="message", type="log", tickvals=ticks, ticktext=names, tickangle=-45)
    figure.update_yaxes(title_text="transfer, ms", type="log", dtick=1)
    return finish(figure, "Transfers by size, cold and warm: medians, and between the quartiles", 430)
