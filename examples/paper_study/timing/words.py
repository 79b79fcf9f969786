"""What the measurements say, in sentences: each from numbers of the tables, none without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pandas as pd

from commtrace.analyses.engine import NamedTables, rows_of
from commtrace.formatting import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_duration,
    format_plural,
    format_share,
    is_known,
)

from .points import HIDDEN, LENGTH
from .receives import FIRST, GRADIENTS, HIDDEN_STATES, LATER

BUSY: Final = 0.1
"""Cores that others may keep busy before it is said."""


def spread(write: Callable[[Any], str], middle: Any, least: Any, most: Any) -> str:
    """Return "5 ms (4 ms to 7 ms)", or "5 ms" for a single value."""
    return write(middle) if least == most else f"{write(middle)} ({write(least)} to {write(most)})"


def of_machine(runs: pd.DataFrame) -> Iterator[str]:
    """What must be known before any number is believed. `runs`: `time_runs`."""
    ranks, cores = format_plural(int(runs["ranks"].max()), "rank"), runs["cores"].dropna()
    told = f" on {format_plural(int(cores.min()), 'core')}" if len(cores) else ""
    repeats = runs.groupby(["scheme", "hidden", "seq_length"])["repeat"].nunique()
    spread = format_plural(int(repeats.max()), "run") + (
        f" ({int(repeats.min())} at least)" if repeats.nunique() > 1 else ""
    )
    yield (
        f"Measured with {ranks}{told}, gloo, fp32, one thread a rank; each point in {spread}, all points once before "
        "any is run again. Figures show the median run and the fastest and slowest."
    )
    for crowded in sorted(set(runs["shared_cores"]) - {""}):
        yield (
            f"{crowded}: they take turns in computing, and a rank whose turn it is not keeps the others waiting. These "
            "times say nothing of the network."
        )
    others = runs["others_cores"].dropna().astype(float)
    if len(others) and others.max() > BUSY:
        yield (
            f"The machine was busy: other programs kept {others.median():.1f} cores at work while a run went on "
            f"(median; {others.min():.1f} to {others.max():.1f}). Differences within the spread are no findings."
        )
    if (runs["recorder"] != "native").any():
        yield (
            "Recorded by the recorder in Python, which does not see the end of calls that go on behind the program's "
            "back: overlapped communication counts as computing. `commtrace build` makes the native one."
        )


def of_parts(points: pd.DataFrame) -> Iterator[str]:
    """Where a step goes. `points`: `time_points`, of one sequence length."""
    for row in rows_of(points.loc[points["hidden"] == HIDDEN]):
        total = row.computing_ns + row.overlapped_ns + row.communicating_ns + row.waiting_ns
        computing, overlapped = (row.computing_ns + row.overlapped_ns) / total, row.overlapped_ns / total
        beside = f" ({format_share(overlapped)} with a call under way)" if overlapped > 5e-4 else ""
        yield (
            f"{row.scheme}: a step of {spread(format_duration, row.step_ns, row.step_ns_least, row.step_ns_most)} is "
            f"{format_share(computing)} computing{beside}, {format_share(row.communicating_ns / total)} "
            "communication that is "
            f"exposed, {format_share(row.waiting_ns / total)} waiting for another rank."
        )


def of_throughput(points: pd.DataFrame) -> Iterator[str]:
    """What longer sequences do to the speed. `points`: `time_points` of one width, several lengths."""
    for scheme, part in points.groupby("scheme", sort=False):
        ends = part.sort_values("seq_length").iloc[[0, -1]]
        if ends["seq_length"].nunique() < 2 or ends["gflop_per_s"].isna().any():
            continue
        first, last = (row for _, row in ends.iterrows())
        yield (
            f"{scheme}: from {format_count(first['seq_length'])} to {format_count(last['seq_length'])} tokens a "
            "sequence "
            f"{_times(first, last, 'tokens_per_s')} the tokens a second "
            f"({format_count(round(first['tokens_per_s']))} to "
            f"{format_count(round(last['tokens_per_s']))}), {_times(first, last, 'gflop_per_s')} the GFLOP/s of a rank."
        )


def _times(first: pd.Series[Any], last: pd.Series[Any], name: str) -> str:
    return f"{last[name] / first[name]:.2f} times"


def of_bandwidths(table: pd.DataFrame) -> Iterator[str]:
    """Bus bandwidths, shortest and longest sequence. `table`: `time_bandwidths` of one operation or more."""
    for (scheme, op), part in table.groupby(["scheme", "op"], sort=False):
        ends = part.sort_values("seq_length").iloc[[0, -1]]
        told = [
            f"{spread(format_bandwidth, *(row[f'busbw_gb_per_s{end}'] for end in ('', '_least', '_most')))} GB/s, "
            f"{format_bytes(row['message_bytes'])} on the bus, at {format_count(row['seq_length'])} tokens"
            for _, row in ends.drop_duplicates("seq_length").iterrows()
        ]
        yield f"{op} of {scheme}: {', '.join(told)}."


def of_receives(summary: pd.DataFrame, forwards: pd.DataFrame) -> Iterator[str]:
    """Receives of a pipeline, cold and warm. `summary`: `receives.by_kind`, `forwards`: `time_forwards`, of a point."""
    yield from _activations({(row.what, row.when): row for row in rows_of(summary)})
    yield from _warming(forwards)


def _activations(rows: dict[Any, Any]) -> Iterator[str]:
    for what in (HIDDEN_STATES, GRADIENTS):
        first, later = rows.get((what, FIRST)), rows.get((what, LATER))
        if first is None or later is None or not is_known(first.transfer_ns_median):
            continue
        ratio = first.transfer_ns_median / later.transfer_ns_median if later.transfer_ns_median else float("nan")
        within = later.transfer_ns_least <= first.transfer_ns_median <= later.transfer_ns_most
        yield (
            f"The first {what}, {format_bytes(first.payload_bytes)}: a transfer of "
            f"{format_duration(first.transfer_ns_median)}, "
            f"{ratio:.2f} times the later ones' median ({format_duration(later.transfer_ns_median)}; "
            f"{format_duration(later.transfer_ns_least)} to {format_duration(later.transfer_ns_most)}), "
            f"{'within' if within else 'outside'} "
            "their spread. Behind the first micro-batch of later steps, "
            f"{format_share(later.late_ns / later.receive_ns)} of "
            f"the time in receives of {what} is waiting for the sender."
        )


def _warming(forwards: pd.DataFrame) -> Iterator[str]:
    first, later = forwards.loc[forwards["step"] == 0], forwards.loc[forwards["step"] > 0]
    if not len(first) or not len(later):
        return
    yield (
        "What the receiver waits for is the stage before: it computes for "
        f"{format_duration(first['before_first_ns'].median())} "
        "between the hand-shake and its first message, and its second forward pass takes "
        f"{format_duration(first['second_forward_ns'].median())} in the first step, "
        f"{format_duration(later['second_forward_ns'].median())} "
        "in later ones. From the last call of a step to the first message of the next, with the optimizer between "
        f"them, it is {format_duration(later['before_first_ns'].median())}."
    )


def largest(tables: NamedTables) -> int:
    """The sequence length at which schemes are compared: LENGTH where it was run, else the longest."""
    lengths = tables["time_points"]["seq_length"]
    return LENGTH if LENGTH in lengths.to_numpy() else int(lengths.max())
