"""Figures of training steps across ranks: which rank was late when, and what the end of a step depended on."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from commtrace.analyses.grouping import rows_of
from commtrace.formatting import MAX_SINGLE, format_duration, is_known

from . import style
from .style import finish, in_order, label, numbered_rows, span_bars, time_scale

SHOWN_RANKS: Final = 64
"""Maximum number of rows of a critical path: the ranks with the largest part of it."""
MAX_ROWS: Final = 48
MAX_COLUMNS: Final = 160
"""Maximum size of a heat map of more than MAX_SINGLE ranks. A cell is the largest value of its ranks and steps."""


def delays(table: pd.DataFrame) -> go.Figure:
    """Draw `delay_by_rank_and_step`: a row per rank and a column per step, or per range if there are many."""
    late = table.pivot_table(index="rank", columns="step", values="delay_ns", aggfunc="sum").clip(lower=0)
    binned = len(late) > MAX_SINGLE
    rows, columns = (
        np.array_split(np.arange(length), min(length, most) if binned else length) if length else []
        for length, most in zip(late.shape, (MAX_ROWS, MAX_COLUMNS), strict=True)
    )
    cells = [[_largest_delay(late, part, steps) for steps in columns] for part in rows]
    values = np.array([[ns for ns, _ in row] for row in cells], float).reshape(len(rows), len(columns))
    scale = time_scale(values.ravel().tolist())
    figure = go.Figure(
        style.heat_map(
            scale.unit,
            x=[float(late.columns[steps].to_numpy().mean()) for steps in columns] if binned else late.columns.tolist(),
            z=values / scale.divisor,
            text=[[hover for _, hover in row] for row in cells],
            hovertemplate="%{text}<extra></extra>",
        )
    )
    figure.update_xaxes(title_text="training step")
    figure.update_yaxes(**numbered_rows(f"rank {_range(late.index[part])}" for part in rows))
    return finish(figure, "Computation beyond that of the other ranks", max(240, 150 + 18 * len(rows)))


def _largest_delay(late: pd.DataFrame, rows: Any, columns: Any) -> tuple[float, str]:
    """Return the largest delay in ns of a range of rows and columns, and its hover text."""
    block = late.to_numpy()[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    row, column = divmod(int(np.nan_to_num(block, nan=-1).argmax()), len(columns))
    place = f"rank {_range(late.index[rows])}, step {_range(late.columns[columns])}"
    longer = f"{format_duration(block[row, column])} longer than the median of the others"
    if block.size > 1:
        longer = f"up to {longer} (rank {late.index[rows[row]]}, step {late.columns[columns[column]]})"
    return float(block[row, column]), f"{place}<br>{longer}"


def _range(numbers: pd.Index[Any]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def critical_path(table: pd.DataFrame) -> go.Figure:
    """Draw `critical_path` of the slowest step: a row per rank that it goes through."""
    path = table.loc[table["which"] == "slowest"]
    on_path = path.groupby("rank")["ns"].sum().nlargest(SHOWN_RANKS)
    ranks = sorted(on_path.index)
    path = path.loc[path["rank"].isin(ranks)]
    place = {rank: number for number, rank in enumerate(ranks)}
    scale = time_scale(path["begin_ns"] + path["ns"])
    figure = go.Figure()
    kinds: list[tuple[pd.DataFrame, dict[str, Any]]] = [
        (path.loc[path["part"] == "computation"], {"name": "computation", "marker": {"color": style.GREY}})
    ]
    calls = path.loc[path["part"] != "computation"]
    kinds += [(calls.loc[calls["op"] == op], style.operation_style(op)) for op in in_order(calls["op"])]
    for rows, paint in kinds:
        y, hover = [place[rank] for rank in rows["rank"]], map(_hover, rows_of(rows))
        figure.add_trace(span_bars(rows["begin_ns"], rows["ns"], scale, y=y, hover=hover, width=0.6, **paint))
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title_text=f"time since the start of the step, {scale.unit}")
    figure.update_yaxes(**numbered_rows(f"rank {rank}" for rank in ranks))
    step = int(path["step"].iloc[0]) if len(path) else 0
    return finish(figure, f"Critical path of the slowest step, {step}", max(240, 150 + 26 * len(ranks)))


def _hover(row: Any) -> str:
    lines = [f"rank {row.rank}, {label(row.op if is_known(row.op) else row.part)}", format_duration(row.ns)]
    lines.append(f"phase {label(row.phase)}")
    return "<br>".join(lines + ([label(row.site)] if is_known(row.site) and row.site else []))
