"""Section of the calls that do not end: the diagnosis of a job that hangs or died."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pandas as pd

from commtrace.analyses.grouping import rows_of
from commtrace.analyses.sections import Section, Tables
from commtrace.formatting import format_duration, format_moment, format_plural, is_known
from commtrace.rank_ranges import format_ranks, name_ranks, parse_ranks, shorten_rank_list

from . import stalls, stuck_calls
from .culprits import find_culprits
from .disagreements import ORDER
from .stalls import STALLED_THREADS
from .stuck_calls import STUCK_CALLS, STUCK_RANKS

MAX_CIRCLE: Final = 4
"""Calls of a circle that the diagnosis names."""
MAX_STUCK_CALLS: Final = 3
"""Stuck calls that the diagnosis describes."""
MAX_CULPRITS: Final = 3
"""Culprits that it names: of the surest, those that stopped first."""


def diagnosis(tables: Tables) -> Iterator[str]:
    """Yield the diagnosis of a job that hangs or died: culprits, incomplete calls, where their ranks are."""
    calls, ranks = tables["stuck_calls"], tables["stuck_ranks"]
    yield from _verdicts(tables)
    in_circle = calls["disagreement"].str.startswith(f"{ORDER}:").to_numpy(bool)
    if in_circle.sum() > 1:
        yield _circle(calls.loc[in_circle])
        calls = calls.loc[~in_circle]
    for number, call in zip(calls.index[:MAX_STUCK_CALLS], rows_of(calls.head(MAX_STUCK_CALLS)), strict=True):
        at_call = ranks.loc[ranks["stuck_call"] == number]
        waiting = at_call.loc[at_call["part"] == "waiting"]
        yield f"{_name(call)} {_stuck(call, waiting.loc[waiting['state'] == 'failed', 'rank'].tolist())}."
        shown = at_call if call.disagreement else at_call.loc[at_call["part"] == "absent"]
        where = shown.fillna({"state": "", "call": ""}).groupby(["part", "call", "state", "site", "end"], sort=False)
        for (part, last, state, site, end), group in [*where][:MAX_STUCK_CALLS]:
            who = name_ranks(format_ranks(group["rank"]), "Rank")
            yield f"{who} {_place(part, last, state, site, group)}; {_END[end]}."
    if len(calls) > MAX_STUCK_CALLS:
        yield f"{format_plural(len(calls) - MAX_STUCK_CALLS, 'more stuck call')}: table `stuck_calls` (--json)."


def _verdicts(tables: Tables) -> Iterator[str]:
    """Yield which ranks a hang begins with, what they do, and who waits for them."""
    involved: set[int] = set()
    for culprit in find_culprits(tables)[:MAX_CULPRITS]:
        yield culprit.describe(also=bool(involved and culprit.waiting) and involved.isdisjoint(culprit.involved))
        involved |= culprit.involved


def _name(call: Any) -> str:
    number = f" {call.seq:,}" if is_known(call.seq) else ""
    return f"{call.op}{number} of ranks {shorten_rank_list(call.group_ranks)}"


def _circle(calls: pd.DataFrame) -> str:
    """Describe calls whose ranks wait for each other in a circle."""
    texts = [
        f"{name_ranks(call.waiting_ranks)} {'is' if call.waiting_ranks.isdecimal() else 'are'} in {_name(call)} "
        f"({call.site or 'call site not recorded'}), without {name_ranks(call.absent_ranks)}"
        for call in rows_of(calls.head(MAX_CIRCLE))
    ]
    more = len(calls) - len(texts)
    texts += [f"and {more:,} more"] if more else []
    since, waited = format_moment(calls["since_ns"].min()), calls["waited_ns"].min()
    duration = f", for at least {format_duration(waited)}" if waited else ""
    return f"{len(calls):,} calls wait for each other in a circle since {since} UTC{duration}: {'; '.join(texts)}."


def _stuck(call: Any, failed: Sequence[int]) -> str:
    """Describe a stuck call, which failed on the ranks `failed`."""
    texts = []
    since, site = f"at {format_moment(call.since_ns)} UTC", call.site or "call site not recorded"
    if failed:
        texts.append(f"it failed on {name_ranks(format_ranks(failed))} ({site})")
    if in_call := format_ranks({*parse_ranks(call.waiting_ranks)} - {*failed}):
        # If it failed on others, how long they waited says nothing about these.
        waited = f" and stayed in it for at least {format_duration(call.waited_ns)}" * (not failed)
        texts.append(f"{name_ranks(in_call)} entered it {since}{waited} ({site})")
    if call.absent_ranks:
        texts.append(f"{name_ranks(call.absent_ranks)} did not enter it{', or ended in it' * bool(failed)}")
    if call.disagreement:
        texts.append(f"the ranks disagree ({call.disagreement})")
    elif not call.absent_ranks:
        texts.append("all its ranks entered it, and agree")
    return ("did not complete: " if failed else "has not completed: ") + "; ".join(texts)


def _place(part: str, call: str, state: str, site: str, ranks: pd.DataFrame) -> str:
    """Return where ranks are."""
    if not call:
        return "made no call"
    ago = format_duration((ranks["alive_ns"] - ranks["begin_ns"]).max())
    at = f" at {site}" if site else ""
    last_seen = f"{ago} before the {'rank was' if len(ranks) == 1 else 'ranks were'} last seen"
    return f"{'last entered' if part == 'absent' else 'entered'} {call}{at} ({state}), {last_seen}"


_END: Final = {
    "runs": "still running",
    "exit": "log closed",
    "died": "ended without closing its log",
    "unknown": "not known whether it is running",
}


STUCK_SECTION: Final = Section(
    "stuck",
    "Calls that do not end",
    (STUCK_CALLS, STUCK_RANKS, STALLED_THREADS),
    (stuck_calls.ANALYSIS, stalls.ANALYSIS),
    look_for="The calls in which the job hangs, or died, and where each of their ranks is.",
    alarms=diagnosis,
)
