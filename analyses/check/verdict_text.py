"""Verdict as text; cells with the same difference on several ranks or steps share a paragraph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pandas as pd

from commtrace.analyses.fold_engine import rows_of
from commtrace.formatting import format_plural, format_ranks

from .verdict import NUMBERS, Verdict

MAX_PARAGRAPHS: Final = 40


def lines(verdict: Verdict) -> Iterator[str]:
    """Return the lines of the verdict, the most important last."""
    paragraphs = merge_equal_cells(verdict.differences)
    for paragraph in rows_of(paragraphs.head(MAX_PARAGRAPHS)):
        yield from _paragraph(paragraph)
    if len(paragraphs) > MAX_PARAGRAPHS:
        yield f"... and {len(paragraphs) - MAX_PARAGRAPHS:,} more; all are in the report's table `reconciliation`"
    yield from (f"not compared: {reason}." for reason in verdict.not_compared)
    yield _conclusion(verdict)


def merge_equal_cells(differences: pd.DataFrame) -> pd.DataFrame:
    """Merge cells that differ only in rank and step, in the order of their first step; `ranks` and `steps` are text."""
    equal = ["role", "op", *NUMBERS, "calls_max", "causes", "sites"]
    by_rank = differences.groupby(["rank", *equal], dropna=False, sort=False).agg(
        steps=("step", _format_steps), first=("step", "min")
    )
    groups = by_rank.reset_index().groupby([*equal, "steps"], dropna=False, sort=False)
    merged = groups.agg(ranks=("rank", format_ranks), first=("first", "min")).reset_index()
    return merged.sort_values("first", kind="stable", ignore_index=True)


def _format_steps(steps: pd.Series[int]) -> str:
    training = format_ranks(step for step in steps if step >= 0)
    return " and ".join(["start-up"] * bool((steps < 0).any()) + [f"step {training}"] * bool(training))


def _paragraph(row: Any) -> Iterator[str]:
    yield f"rank {row.ranks}, {row.steps}, {row.op} of role {row.role}:"
    most = f" (at most {format_plural(row.calls_max, 'call')})" if not pd.isna(row.calls_max) else ""
    yield f"    expected {_volume(row.expected_calls, row.expected_bytes)}{most}"
    yield f"    measured {_volume(row.measured_calls, row.measured_bytes)}: {_difference(row)}"
    if row.causes:
        yield f"    most likely cause: {row.causes}"
    if row.sites:
        yield f"    from {row.sites}"


def _volume(calls: Any, size: Any) -> str:
    together = " together" if calls > 1 else ""
    return f"{format_plural(int(calls), 'call')} of {format_plural(int(size), 'byte')}{together}"


def _difference(row: Any) -> str:
    calls, size = int(row.measured_calls - row.expected_calls), int(row.measured_bytes - row.expected_bytes)
    if not calls and not size:
        return "the same number of calls, of other sizes"
    return f"{calls:+,} calls, {size:+,} bytes"


def _conclusion(verdict: Verdict) -> str:
    compared = f"{format_plural(verdict.cells, 'cell')} of rank {format_ranks(verdict.ranks)}"
    if len(verdict.differences):
        return f"differs from theory: {len(verdict.differences):,} of {compared}"
    if not verdict.ranks:
        return "not compared with theory, so there is no verdict"
    return f"as expected: {compared}" + (", but not all ranks were compared" if verdict.not_compared else "")
