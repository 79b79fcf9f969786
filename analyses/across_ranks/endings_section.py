"""Section of the ends of processes: who ended first, by what, and what became of the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pandas as pd

from commtrace.analyses.grouping import rows_of
from commtrace.analyses.sections import Section, Tables
from commtrace.formatting import format_duration, format_plural, is_known
from commtrace.rank_ranges import format_ranks, name_ranks

from . import endings
from .endings import ENDINGS, THREAD_EXCEPTIONS

MAX_GROUPS: Final = 3
"""Groups of processes with different ends that are described."""


def describe_endings(tables: Tables) -> Iterator[str]:
    """Yield who ended first and by what, what became of the others, and exceptions of threads."""
    table = tables["endings"]
    if len(table):
        yield from _ends(table)
    threads = tables["thread_exceptions"]
    for _, alike in [*threads.astype({"site": object}).fillna({"site": ""}).groupby(["reason", "site"], sort=False)][
        :MAX_GROUPS
    ]:
        row = next(rows_of(alike.head(1)))
        who = name_ranks(format_ranks({*alike["rank"]}))
        yield f"A thread of {who} ended by {_exception(row)}{_step(row)}; the process went on."


def _ends(table: pd.DataFrame) -> Iterator[str]:
    ended = table.loc[~table["end"].isin(["runs", "unknown"])]
    keys = (
        ended.astype({"site": object})
        .fillna({"site": ""})
        .groupby(["end", "reason", "site", "step"], sort=False, dropna=False)
        .indices
    )
    groups = [ended.iloc[rows] for rows in keys.values()]
    groups.sort(key=lambda group: (group["order"].iloc[0] != "first", group["after_ns"].fillna(0).min()))
    first, *others = groups
    is_all = len(first) == len(table)
    if is_all and len(first) > 1:
        yield f"All {len(first):,} processes ended {_phrase(first)}."
    elif len(first) == len(table) or (first["order"] == "first").all():
        yield f"{_who(first)} ended {'' if is_all else 'first, '}{_phrase(first)}."
    elif (first["order"] == "first").any():
        one, rest = first.loc[first["order"] == "first"], first.loc[first["order"] != "first"]
        yield f"{_who(one)} ended first, {_phrase(one)}."
        others = [rest, *others]
    else:
        yield "Which process ended first is not known."
        others = groups
    is_exact = not first["end"].isin(["signal", "died"]).any()
    for group in others[:MAX_GROUPS]:
        yield f"{_later(group, is_exact=is_exact)}{_phrase(group)}."
    if len(others) > MAX_GROUPS:
        more = sum(map(len, others[MAX_GROUPS:]))
        yield f"{format_plural(more, 'more process', 'more processes')}: table `endings` (--json)."
    for end, text in (("runs", "still running"), ("unknown", "not known to have ended: see `commtrace recover`")):
        rows = table.loc[table["end"] == end]
        if len(rows):
            yield f"{_who(rows)} {'is' if len(rows) == 1 else 'are'} {text}."


def _who(group: pd.DataFrame) -> str:
    return name_ranks(format_ranks({*group["rank"]}), "Rank")


def _later(group: pd.DataFrame, *, is_exact: bool) -> str:
    """Return the begin of a sentence on processes that did not end first; `is_exact`: when the first ended is known."""
    after = group["after_ns"].min() if group["after_ns"].notna().all() else 0
    is_exact = is_exact and not group["end"].isin(["signal", "died"]).any()
    time = f"{'' if is_exact else 'at least '}{format_duration(after)} later, " if after else ""
    return f"{_who(group)} ended {time}"


def _phrase(group: pd.DataFrame) -> str:
    """Return by what processes ended, and where."""
    row = next(rows_of(group.head(1)))
    if row.end == "exception":
        return f"by {_exception(row)}{_step(row)}"
    if row.end == "died":
        log = "its log" if len(group) == 1 else "their logs"
        return f"without closing {log}{_step(row)} (by a signal, or without Python's exit handlers)"
    reasons = {
        "signal": f"by {row.reason}",
        "abort": f"by {row.reason}",
        "status": f"with {row.reason}",
        "exit": "at the end of the program" + (f" ({row.reason})" if row.reason else " (exit status not known)"),
        "stopped": "after it had stopped tracing",
    }
    return reasons[row.end] + _step(row)


def _exception(row: Any) -> str:
    at = f" at {row.site}" if row.site else ""
    return f"{row.reason}{at}" + (f' ("{row.message}")' if row.message else "")


def _step(row: Any) -> str:
    return "" if not is_known(row.step) else f" in step {row.step:,}" if row.step >= 0 else " before the first step"


ENDINGS_SECTION: Final = Section(
    "endings",
    "How the processes ended",
    (ENDINGS, THREAD_EXCEPTIONS),
    (endings.ANALYSIS,),
    look_for="The process that ended first, and its reason: the others often end because of it.",
    alarms=describe_endings,
)
