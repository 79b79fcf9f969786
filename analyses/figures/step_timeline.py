"""Figure of the calls of one training step, rank by rank."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from commtrace.analyses.grouping import rows_of
from commtrace.formatting import format_bytes, format_count, format_duration
from commtrace.rank_ranges import format_ranks

from .style import finish, in_order, label, numbered_rows, operation_style, span_bars, time_scale

MAX_BARS: Final = 3000
"""If there are more calls, neighbours of one operation are drawn as one bar."""

SHOWN_RANKS: Final = 16


def timeline(table: pd.DataFrame) -> go.Figure:
    """Draw the calls of `timeline` over time: a row per rank, up to SHOWN_RANKS, and within it one per operation."""
    every_rank = sorted(table["rank"].unique())
    ranks = every_rank[:SHOWN_RANKS]
    spans = _spans(table.loc[table["rank"].isin(ranks)])
    operations = in_order(spans["op"])
    scale = time_scale(spans["end"])
    lane = 0.84 / max(len(operations), 1)
    place = {rank: number for number, rank in enumerate(ranks)}
    figure = go.Figure()
    for number, op in enumerate(operations):
        of_op = spans.loc[spans["op"] == op]
        y, hover = of_op["rank"].map(place) - 0.42 + lane * (number + 0.5), map(_hover, rows_of(of_op))
        options = {"hover": hover, "width": lane * 0.9, **operation_style(op)}
        figure.add_trace(span_bars(of_op["begin"], of_op["end"] - of_op["begin"], scale, y=y, **options))
    step = int(table["step"].iloc[0]) if len(table) else 0
    figure.update_xaxes(title_text=f"time since the first of these calls began, {scale.unit}")
    figure.update_yaxes(**numbered_rows(f"rank {rank}" for rank in ranks))
    for edge in range(1, len(ranks)):
        figure.add_hline(y=edge - 0.5, line={"width": 1, "color": "rgba(138,148,160,0.35)"})
    figure.update_layout(barmode="overlay")
    rows = max(26, min(20 * len(operations), 640 // max(len(ranks), 1)))
    title = f"Timeline of training step {step}" + (f", ranks {format_ranks(ranks)}" if ranks != every_rank else "")
    return finish(figure, title, max(240, 150 + rows * len(ranks)))


def _spans(table: pd.DataFrame) -> pd.DataFrame:
    """Return bars (times in ns): `rank`, `op`, `begin`, `end`, `ended`, `calls`, `payload_bytes`, `phase`, `site`."""
    ended = table["to_completion_ns"].notna()
    length = table["to_completion_ns"].fillna(table["in_call_ns"]).fillna(0).astype(np.int64)
    calls = table.assign(begin=table["begin_ns"], end=table["begin_ns"] + length, ended=ended, calls=1)
    columns = ["rank", "op", "begin", "end", "ended", "calls", "payload_bytes", "phase", "site"]
    spans = calls[columns].sort_values(["rank", "op", "begin"], kind="stable")
    duration = float(spans["end"].max() - spans["begin"].min()) if len(spans) else 0.0
    gap = duration / 1000
    while len(spans) > MAX_BARS and gap <= 2 * duration:
        spans, gap = _joined(spans, gap), gap * 2
    return spans


def _joined(spans: pd.DataFrame, gap: float) -> pd.DataFrame:
    """Join spans of one rank and operation that are less than `gap` ns apart."""
    lanes = [spans["rank"], spans["op"]]
    latest = spans.groupby(lanes, sort=False)["end"].cummax().groupby(lanes, sort=False).shift()
    number = (latest.isna() | (spans["begin"] - latest > gap)).cumsum()
    how = {"begin": "min", "end": "max", "ended": "all", "calls": "sum", "payload_bytes": "sum"}
    return spans.groupby(number, as_index=False).agg({column: how.get(str(column), "first") for column in spans})


def _hover(row: Any) -> str:
    calls = label(row.op) if row.calls == 1 else f"{format_count(row.calls)} calls of {label(row.op)}, drawn as one"
    length = format_duration(row.end - row.begin)
    inside = f"{length} inside {'the call' if row.calls == 1 else 'the calls'}; the end was not observed"
    lines = [f"{calls}, payload {format_bytes(row.payload_bytes)}", length if row.ended else inside]
    if row.calls == 1:
        lines += [f"phase {label(row.phase)}", label(row.site or "call site not recorded")]
    return "<br>".join(lines)
