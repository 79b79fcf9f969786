"""A verdict in words: cells that differ alike, on several ranks and in several steps, take one paragraph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pandas as pd

from commtrace.analyses.engine import rows_of
from commtrace.formatting import format_plural, format_ranks

from .verdict import NUMBERS, Verdict

MOST: Final = 40
"""Paragraphs that are written."""


def lines(verdict: Verdict) -> Iterator[str]:
    """The verdict, the most important last."""
    found = merged(verdict.differences)
    for one in rows_of(found.head(MOST)):
        yield from _cell(one)
    if len(found) > MOST:
        yield f"... and {len(found) - MOST:,} more such; the table `reconciliation` of the report has all"
    yield from (f"not compared: {reason}." for reason in verdict.not_compared)
    yield _end(verdict)


def merged(differences: pd.DataFrame) -> pd.DataFrame:
    """Cells that are alike but for rank and step, in the order of their first one; `ranks` and `steps` in words."""
    alike = ["role", "op", *NUMBERS, "calls_max", "causes", "sites"]
    by_rank = differences.groupby(["rank", *alike], dropna=False, sort=False)["step"].agg(_steps).reset_index()
    by_rank["first"] = differences.groupby(["rank", *alike], dropna=False, sort=False)["step"].min().to_numpy()
    grouped = by_rank.groupby([*alike, "step"], dropna=False, sort=False)
    found = grouped.agg(ranks=("rank", format_ranks), first=("first", "min")).reset_index()
    return found.rename(columns={"step": "steps"}).sort_values("first", kind="stable", ignore_index=True)


def _steps(steps: pd.Series[int]) -> str:
    training = format_ranks(step for step in steps if step >= 0)
    parts = ["start-up"] * bool((steps < 0).any()) + [f"step {training}"] * bool(training)
    return " and ".join(parts)


def _cell(one: Any) -> Iterator[str]:
    yield f"rank {one.ranks}, {one.steps}, {one.op} of role {one.role}:"
    most = f" (at most {format_plural(one.calls_max, 'call')})" if not pd.isna(one.calls_max) else ""
    yield f"    expected {_volume(one.expected_calls, one.expected_bytes)}{most}"
    yield f"    measured {_volume(one.measured_calls, one.measured_bytes)}: {_difference(one)}"
    if one.causes:
        yield f"    likeliest cause: {one.causes}"
    if one.sites:
        yield f"    from {one.sites}"


def _volume(calls: Any, size: Any) -> str:
    return f"{format_plural(int(calls), 'call')} of {format_plural(int(size), 'byte')}" + (
        " together" if calls > 1 else ""
    )


def _difference(one: Any) -> str:
    calls, size = int(one.measured_calls - one.expected_calls), int(one.measured_bytes - one.expected_bytes)
    if not calls and not size:
        return "the same number of calls, of other sizes"
    return f"{calls:+,} calls, {size:+,} bytes"


def _end(verdict: Verdict) -> str:
    where = f"{format_plural(verdict.cells, 'cell')} of rank {format_ranks(verdict.ranks)}"
    if len(verdict.differences):
        return f"differs from theory: {len(verdict.differences):,} of {where}"
    if not verdict.ranks:
        return "not compared with theory, so nothing can be said"
    return f"as expected: {where}" + (", but not all ranks were compared" if verdict.not_compared else "")
