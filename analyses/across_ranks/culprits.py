"""Culprits: the ranks that a hang begins with, what they do, and how sure that is.

A rank that waits in a stuck call is no culprit, whatever other calls lack it: it is late because it waits. Culprits are
the absent ranks that wait in none, and ranks that make no progress outside of calls while no other hang explains it.
Two hangs are independent if no rank waits, directly or in turn, for the culprits of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pandas as pd

from commtrace.analyses.grouping import rows_of
from commtrace.formatting import format_duration, is_known
from commtrace.rank_ranges import format_ranks, name_ranks, parse_ranks

from .stuck_calls import OUTLIVED_NS

HIGH: Final = "high"
"""Others wait in a call that these ranks provably did not enter, and it is known what they do, or that they ended."""
MEDIUM: Final = "medium"
"""Others wait for these ranks, but in which call, or what these ranks do instead, is not known."""
LOW: Final = "low"
"""No rank is known to wait for these, as in a hang outside of recorded calls: they may wait themselves."""
CONFIDENCES: Final = (HIGH, MEDIUM, LOW)
_ENDS: Final = {"exit": "closed the log", "died": "ended without closing the log"}
_NOT_KNOWN: Final = "not known why"


@dataclass(frozen=True)
class Culprit:
    """Ranks that a hang begins with, which do the same.

    Attributes:
        ranks: The ranks, ascending.
        activity: What they do, as in `stalled_threads`, or "closed the log", "ended without closing the log", or "not
            known why".
        function: Where they do it, as in `stalled_threads`; "" if that is not known.
        line: The program's line, likewise.
        stalled_ns: The longest time without progress; 0 if it is not known.
        since_ns: When the first of them made progress for the last time, since 1970; None if it is not known.
        waiting: The ranks that wait for them, also in turn, ascending.
        confidence: One of CONFIDENCES.
    """

    ranks: tuple[int, ...]
    activity: str
    function: str
    line: str
    stalled_ns: int
    since_ns: int | None
    waiting: tuple[int, ...]
    confidence: str

    @property
    def involved(self) -> set[int]:
        """The ranks, and those that wait for them."""
        return {*self.ranks, *self.waiting}

    def describe(self, *, also: bool = False) -> str:
        """Return a sentence; `also`: of a hang beside another one, which it does not follow from."""
        who = name_ranks(format_ranks(self.ranks), "rank" if also else "Rank")
        where = f" in {self.function}" * bool(self.function)
        where += f", called from {self.line}" * bool(self.line and self.line != self.function)
        if self.stalled_ns:
            text = f"made no progress for {format_duration(self.stalled_ns)}: {self.activity}{where}"
        else:
            text = f"did not come: {self.activity}" if self.activity == _NOT_KNOWN else self.activity
        if self.waiting:
            text += f"; {name_ranks(format_ranks(self.waiting))} waited for {'it' if len(self.ranks) == 1 else 'them'}"
        return f"{'Independently, ' * also}{who} {text} (confidence: {self.confidence})."


def find_culprits(tables: Mapping[str, pd.DataFrame]) -> list[Culprit]:
    """Return the culprits of a hang, the surest first, then those that stopped first.

    Args:
        tables: `stuck_calls`, `stuck_ranks` and `stalled_threads` of a run.
    """
    threads, ranks = tables["stalled_threads"], tables["stuck_ranks"]
    stalls = {int(row.rank): row for row in rows_of(threads.loc[threads["is_main"]])}
    waiters: dict[int, set[int]] = {}
    waiting: set[int] = set()
    for call in rows_of(tables["stuck_calls"]):
        own = {*parse_ranks(call.waiting_ranks)}
        waiting |= own
        for rank in parse_ranks(call.absent_ranks):
            waiters.setdefault(rank, set()).update(own)
    absent = {*waiters} - waiting
    found = [*_absent_culprits(absent, {int(row.rank): row for row in rows_of(ranks)}, stalls, waiters)]
    unexplained = {*stalls} - waiting - absent
    in_calls = {rank for rank in unexplained if _is_true(stalls[rank].in_call)}
    for same in _by_place(unexplained - in_calls, stalls):
        others = () if found else in_calls
        found.append(_culprit(same, stalls, others, MEDIUM if others else LOW))
    return sorted(found, key=lambda one: (CONFIDENCES.index(one.confidence), one.since_ns or 0, one.ranks))


def _absent_culprits(
    absent: set[int], rows: Mapping[int, Any], stalls: Mapping[int, Any], waiters: Mapping[int, set[int]]
) -> Iterator[Culprit]:
    """Yield the culprits among absent ranks that wait in no stuck call; `rows`: the last of `stuck_ranks` by rank."""
    stalled = [rank for rank in sorted(absent) if rank in stalls]
    for same in _by_place(stalled, stalls):
        is_in_call = any(_is_true(stalls[rank].in_call) for rank in same)
        yield _culprit(same, stalls, _waiting_for(same, waiters), MEDIUM if is_in_call else HIGH)
    by_end: dict[str, list[int]] = {}
    for rank in sorted(absent - {*stalled}):
        waiting = [rows[other] for other in _waiting_for([rank], waiters) if other in rows]
        by_end.setdefault(_end(rows[rank], waiting), []).append(rank)
    for activity, same in by_end.items():
        is_known_end = activity != _NOT_KNOWN
        since = min(int(rows[rank].alive_ns) for rank in same) if is_known_end else None
        confidence = HIGH if is_known_end else MEDIUM
        yield Culprit((*same,), activity, "", "", 0, since, _waiting_for(same, waiters), confidence)


def _end(absent: Any, waiting: Iterable[Any]) -> str:
    """Return how a process ended before those that wait for it; that it is not known if all were ended together."""
    is_first = all(other.end == "exit" or other.alive_ns - absent.alive_ns > OUTLIVED_NS for other in waiting)
    return _ENDS.get(absent.end, _NOT_KNOWN) if absent.end == "exit" or is_first else _NOT_KNOWN


def _waiting_for(ranks: Iterable[int], waiters: Mapping[int, set[int]]) -> tuple[int, ...]:
    """Return the ranks that wait for some ranks, also in turn, ascending; `waiters`: those of each rank."""
    seen: set[int] = set()
    reached = [*ranks]
    while reached:
        new = waiters.get(reached.pop(), set()) - seen
        seen |= new
        reached += new
    return (*sorted(seen - {*ranks}),)


def _by_place(ranks: Iterable[int], stalls: Mapping[int, Any]) -> Iterator[list[int]]:
    """Yield the ranks that do the same at the same place."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(ranks):
        row = stalls[rank]
        groups.setdefault((row.activity, _text(row.function), _text(row.line)), []).append(rank)
    yield from groups.values()


def _culprit(ranks: list[int], stalls: Mapping[int, Any], waiting: Iterable[int], confidence: str) -> Culprit:
    rows = [stalls[rank] for rank in ranks]
    since = [int(row.since_ns) for row in rows if is_known(row.since_ns)]
    first, stalled_ns = rows[0], max(int(row.stalled_ns) for row in rows)
    return Culprit(
        (*sorted(ranks),), first.activity, _text(first.function), _text(first.line), stalled_ns,
        min(since, default=None), (*sorted(waiting),), confidence,
    )  # fmt: skip


def _text(value: object) -> str:
    """Return a text of a table; "" if it is missing."""
    return str(value) if is_known(value) else ""


def _is_true(value: object) -> bool:
    """Return whether a flag that may be missing is set."""
    return is_known(value) and bool(value)
