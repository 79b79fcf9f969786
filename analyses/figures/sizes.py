"""Figures of message sizes: calls and bytes by size, and by time and size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from commtrace.analyses.grouping import rows_of
from commtrace.formatting import format_bytes, format_count, format_power_of_two

from .style import bytes_scale, finish, heat_map, hover_texts, in_order, label, operation_style

_NO_PAYLOAD: Final = -1


def message_sizes(table: pd.DataFrame) -> go.Figure:
    """Draw calls (logarithmic) and bytes by size in powers of two and operation, from `message_size_bins`."""
    operations = in_order(table["op"])
    table = table.assign(exponent=_exponents(table["from_bytes"]))
    table = table.sort_values("op", key=lambda ops: ops.map(operations.index), kind="stable")
    # Stacked bars are misleading on a logarithmic axis, so the operations of a bin are drawn side by side.
    in_bin = table.groupby("exponent")["op"]
    width = 0.86 / in_bin.transform("size")
    table = table.assign(width=width, place=table["exponent"] + 0.07 + width * in_bin.cumcount())
    scale = bytes_scale(table.groupby("exponent")["sum_bytes"].sum())
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06)
    for op in operations:
        bins = table.loc[table["op"] == op]
        common = {
            **operation_style(op),
            **hover_texts(
                f"{label(op)}<br>{_bin_text(row.exponent)}<br>{format_count(row.calls)} calls"
                f"<br>{format_bytes(row.sum_bytes)} in total"
                for row in rows_of(bins)
            ),
        }
        calls = go.Bar(x=bins["place"], y=bins["calls"], width=bins["width"], offset=0, **common)
        sums = go.Bar(x=bins["exponent"] + 0.5, y=scale.axis(bins["sum_bytes"]), width=0.86, showlegend=False, **common)
        figure.add_trace(calls, row=1, col=1)
        figure.add_trace(sums, row=2, col=1)
    most = int(table["calls"].max()) if len(table) else 1
    figure.update_yaxes(
        type="log", range=[np.log10(0.6), np.log10(most * 1.6)], title_text="calls (logarithmic)", row=1, col=1
    )
    figure.update_yaxes(dtick="D1" if most < 10 else 1, exponentformat="none", separatethousands=True, row=1, col=1)
    figure.update_yaxes(title_text=f"bytes, {scale.unit}", row=2, col=1)
    figure.update_xaxes(**_size_axis(table["exponent"]))
    figure.update_xaxes(title_text="payload of a call (logarithmic)", row=2, col=1)
    figure.update_layout(barmode="stack")
    return finish(figure, "Message sizes", 480)


def sizes_over_time(table: pd.DataFrame) -> go.Figure:
    """Draw the number of calls of all operations by time and message size, from `sizes_over_time`."""
    table = table.assign(exponent=_exponents(table["from_bytes"]))
    cells = table.groupby(["from_s", "below_s", "exponent"], as_index=False)[["calls", "sum_bytes"]].sum()
    names = table.groupby(["from_s", "exponent"])["op"].agg(lambda ops: ", ".join(in_order(ops)))
    width = float((cells["below_s"] - cells["from_s"]).iloc[0]) if len(cells) else 1.0
    # Every time span and size has a cell; cells without calls are empty.
    column = np.rint(cells["from_s"] / width).astype(int)
    low, high = (int(cells["exponent"].min()), int(cells["exponent"].max())) if len(cells) else (0, 0)
    calls = np.full((high - low + 1, int(column.max()) + 1 if len(cells) else 1), np.nan)
    hover = np.full(calls.shape, "", object)
    for cell, at in zip(rows_of(cells), column, strict=True):
        calls[cell.exponent - low, at] = cell.calls
        ops = label(names[cell.from_s, cell.exponent])
        hover[cell.exponent - low, at] = (
            f"{_bin_text(cell.exponent)}<br>{format_count(cell.calls)} calls, {format_bytes(cell.sum_bytes)}<br>{ops}"
        )
    most = float(np.nanmax(calls)) if len(cells) else 1.0
    ticks = [10**power * digit for power in range(19) for digit in (1, 2, 5) if 10**power * digit <= max(most, 2)]
    if len(ticks) > 6:
        ticks = [tick for tick in ticks if str(tick).startswith("1")]
    figure = go.Figure(
        heat_map(
            "calls",
            {"tickvals": np.log10(ticks), "ticktext": [*map(format_count, ticks)]},
            x0=width / 2,
            dx=width,
            y=np.arange(low, high + 1) + 0.5,
            z=np.log10(calls),
            zmax=max(np.log10(most), 0.3),
            text=hover,
            hovertemplate="%{x:.4g} s<br>%{text}<extra></extra>",
            hoverongaps=False,
            ygap=1,
        )
    )
    figure.update_yaxes(**_size_axis(cells["exponent"]), title_text="payload of a call")
    figure.update_xaxes(title_text="seconds since the first call", rangemode="tozero")
    return finish(figure, "Message sizes over time", 400)


def _exponents(from_bytes: pd.Series[Any]) -> pd.Series[Any]:
    """Return the exponents of powers of two, -1 for the bin of calls without payload."""
    return from_bytes.clip(lower=0.5).map(np.log2).round().astype(int)


def _bin_text(exponent: Any) -> str:
    """Return the limits of a bin as text, such as "256 KiB to below 512 KiB"."""
    if exponent == _NO_PAYLOAD:
        return "no payload"
    return f"{format_power_of_two(int(exponent))} to below {format_power_of_two(int(exponent) + 1)}"


def _size_axis(exponents: Iterable[int]) -> dict[str, Any]:
    """Return an axis with ticks at edges of the bins, about ten at most."""
    low, high = min(exponents, default=0), max(exponents, default=0)
    step = next((step for step in (1, 2, 5) if (high + 1 - low) / step <= 9), 10)
    has_zero = low == _NO_PAYLOAD  # then the edge of 1 B is too close to 0 B for a tick of its own
    edges = [edge for edge in range(max(low, int(has_zero)), high + 2) if edge % step == 0]
    ticks = [*([_NO_PAYLOAD + 0.5] if has_zero else []), *edges]
    texts = [*(["0 B"] if has_zero else []), *map(format_power_of_two, edges)]
    return {"tickvals": ticks, "ticktext": texts, "range": [low - 0.15, high + 1.15]}
