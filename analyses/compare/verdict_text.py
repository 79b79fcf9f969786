"""Verdict as text; cells with the same difference on several ranks or steps share a paragraph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pandas as pd

from commtrace.analyses.grouping import rows_of
from commtrace.formatting import format_plural, format_ranks

from .call_differences import format_steps
from .comparison_text import own_lines, own_volume, wrapped
from .verdict import NUMBERS, Verdict

MAX_PARAGRAPHS: Final = 40


def verdict_lines(verdict: Verdict, width: int) -> Iterator[str]:
    """Yield the lines of the verdict, in paragraphs."""
    yield from wrapped(first_line(verdict), width)
    paragraphs = merge_equal_cells(verdict.differences)
    for paragraph in rows_of(paragraphs.head(MAX_PARAGRAPHS)):
        yield from _paragraph(paragraph, width)
    if len(paragraphs) > MAX_PARAGRAPHS:
        yield f"... and {len(paragraphs) - MAX_PARAGRAPHS:,} more; all are in the report's table `reconciliation`"
    yield from own_lines(verdict.own, width)
    for reason in verdict.not_compared:
        yield from wrapped(f"not compared: {reason}.", width)


def first_line(verdict: Verdict) -> str:
    """Return the first line of the verdict."""
    compared = f"{format_plural(verdict.cells, 'cell')} of rank {format_ranks(verdict.ranks)}"
    own = f"; in addition, {own_volume(verdict.own.values())} of the program" if verdict.own else ""
    if len(verdict.differences):
        return f"differs from the rules: {len(verdict.differences):,} of {compared}{own}"
    if not verdict.ranks:
        return "not compared: there are no rules for this job"
    return f"as expected by the rules: {compared}{own}" + ("; not everything was compared" * bool(verdict.not_compared))


def merge_equal_cells(differences: pd.DataFrame) -> pd.DataFrame:
    """Merge cells that differ only in rank and step, in the order of their first step; `ranks` and `steps` are text."""
    equal = ["role", "op", *NUMBERS, "calls_max", "causes", "sites"]
    by_rank = differences.groupby(["rank", *equal], dropna=False, sort=False).agg(
        steps=("step", format_steps), first=("step", "min")
    )
    groups = by_rank.reset_index().groupby([*equal, "steps"], dropna=False, sort=False)
    merged = groups.agg(ranks=("rank", format_ranks), first=("first", "min")).reset_index()
    return merged.sort_values("first", kind="stable", ignore_index=True)


def _paragraph(row: Any, width: int) -> Iterator[str]:
    yield f"rank {row.ranks}, {row.steps}, {row.op} of dimension {row.role}:"
    most = f" (at most {format_plural(row.calls_max, 'call')})" if not pd.isna(row.calls_max) else ""
    yield f"    expected {_volume(row.expected_calls, row.expected_bytes)}{most}"
    yield f"    recorded {_volume(row.measured_calls, row.measured_bytes)}: {_difference(row)}"
    if row.causes:
        yield from wrapped(f"most likely cause: {row.causes}", width, "    ")
    if row.sites:
        yield from wrapped(f"from {row.sites}", width, "    ")


def _volume(calls: Any, size: Any) -> str:
    together = " together" if calls > 1 else ""
    return f"{format_plural(int(calls), 'call')} of {format_plural(int(size), 'byte')}{together}"


def _difference(row: Any) -> str:
    calls, size = int(row.measured_calls - row.expected_calls), int(row.measured_bytes - row.expected_bytes)
    if not calls and not size:
        return "the same number of calls, different payloads"
    return f"{calls:+,} calls, {size:+,} bytes"
