"""Calls that do not end: which ranks wait in them, which ranks never came, and what ranks disagree about.

What a log shows of a job that hangs, it also shows of one that was interrupted: calls in flight, ranks at different
calls. A call is stuck if one of these holds:

* Waiting: a rank has been in it, and has done nothing else, for `MIN_WAIT_NS` and for `FACTOR` times the longest pause
  between two calls that the ranks concerned had before. A rank that computes for that long is named as one that did not
  come, which is what the log shows.
* Death: one process did not close its log, all others did, and a call that needed it failed on one of them. Of a rank
  that was outlived in a call as above, the report also says that it ended.
* Disagreement: ranks of a group made different operations as their n-th call of it, or the same one with other sizes,
  types or roots.

A rank is absent only if its log proves it: it is complete (closed, recovered, or read from the memory of a process that
still runs), nothing is missing or damaged in it, and it has no call of this number or a later one in the channel.
Nothing is said about ranks whose logs prove nothing, nor about those that left together with the ranks they waited for.

Only logs in which a process did not close its log or has a failed call are examined, and of these the last records.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
import pandas as pd

from commtrace.analyses.fold_engine import NamedTables, RunAnalysis
from commtrace.analyses.grouping import Array, positions_by_value
from commtrace.analyses.table_specs import TABLES
from commtrace.formatting import format_ranks
from commtrace.reading.process_reader import Process
from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.segment_reader import last_records
from commtrace.schema import Flag, State

from .disagreements import Disagreements
from .last_calls import LastCalls, Member
from .matching import NOT_MATCHED, Channel

MIN_WAIT_NS: Final = 5_000_000_000
"""Least time for which a call is in flight before it is called stuck."""
FACTOR: Final = 2
"""Least ratio of that time to the longest pause that the run had before."""
OUTLIVED_NS: Final = 1_000_000_000
"""Time by which processes that are ended together may differ."""


@dataclass
class _Stuck:
    """A call that is not complete."""

    channel: Channel
    number: int
    """Position of the channel in `MatchedCalls.channels`; NOT_MATCHED: none, of a receive of any source or tag."""
    seq: int | None
    calls: dict[Member, int]
    """The call of each process that made it."""
    waiting: list[Member] = field(default_factory=list)
    """Processes that wait in it."""
    absent: Collection[Member] = ()
    """Processes that did not make it, or died in it."""
    disagreement: str = ""
    since_ns: int = 0
    waited_ns: int = 0

    @property
    def example(self) -> int:
        """One of the calls."""
        return next(iter(self.calls.values()))


def _candidates(last: LastCalls, disagree: Array) -> Iterator[_Stuck]:
    """Yield the first call of each channel that is not complete, and the first with a disagreement.

    Args:
        last: The last calls of the run.
        disagree: Whether the calls of each instance disagree, shape (instances,).
    """
    calls, state = last.calls, last.calls["state"]
    # Somebody is, or was, in the call: it did not return, is waited for, or failed.
    awaited = (state == State.RETURNED) & ((calls["t_wait"] > 0) | ((calls["flags"] & Flag.ASYNC) == 0))
    blocked = (state == State.BEGUN) | (state == State.FAILED) | awaited
    at, instance = calls.matched, calls["instance"][calls.matched]
    done, in_it = (
        np.bincount(instance[which[at]], minlength=len(calls.channel)) for which in (state == State.COMPLETE, blocked)
    )
    # An instance lacks a rank if a rank of its channel has no call of its number or above.
    channel, processes = calls.channel, len(last.members)
    users, user = np.unique(channel[instance] * processes + calls["process"][at], return_inverse=True)
    highest = np.full(len(users), -1)
    np.maximum.at(highest, user, calls.seq[instance])
    lowest = np.full(len(calls.channels), np.iinfo(np.int64).max)
    np.minimum.at(lowest, users // processes, highest)
    ranks = np.array([len({*one.ranks}) for one in calls.channels], np.int64)
    lowest[np.bincount(users // processes, minlength=len(ranks)) < ranks] = -1
    lacking = (calls.present < calls.expected) & (calls.seq > lowest[channel]) & (calls.present > done)
    everyone = calls.complete & (done == 0) & (in_it > 0)
    wanted = [np.flatnonzero(which) for which in (lacking | everyone, disagree)]
    # Instances are sorted by channel and number.
    chosen = np.concatenate([which[np.unique(channel[which], return_index=True)[1]] for which in wanted])
    at = at[np.isin(instance, chosen)]
    for number, rows in positions_by_value(calls["instance"][at]).items():
        of_channel = int(channel[number])
        members = {last.member(call): call for call in at[rows].tolist()}
        yield _Stuck(calls.channels[of_channel], of_channel, int(calls.seq[number]), members)
    # Receives in flight that name no source or no tag are in no channel.
    of_any = calls.has_label("op", "recv") & (calls["instance"] == NOT_MATCHED) & blocked
    for call in np.flatnonzero(of_any).tolist():
        member, peer, tag = last.member(call), int(calls["peer"][call]), int(calls["tag"][call])
        if group := last.groups.get(last.text("group", call)):
            addresses = (peer, member.rank, tag) if peer >= 0 else ()
            yield _Stuck(Channel(group, *addresses), NOT_MATCHED, None, {member: call})


class _Examination:
    """Which of the last calls of a run are stuck."""

    def __init__(self, last: LastCalls) -> None:
        self._last, self._calls = last, last.calls
        self._disagreements = Disagreements(last)

    def stuck_calls(self) -> list[_Stuck]:
        """Return the calls that are stuck: first those that others wait for."""
        candidates = _candidates(self._last, self._disagreements.of_instances)
        found = [stuck for stuck in candidates if self._examine(stuck)]
        waits_in = {member: stuck for stuck in found for member in stuck.waiting}
        for stuck in found:
            if not stuck.disagreement and _waits_for_itself(stuck, waits_in):
                stuck.disagreement = self._order(stuck, waits_in)

        def follows(stuck: _Stuck) -> bool:
            return not stuck.disagreement and any(member in waits_in for member in stuck.absent)

        found.sort(key=lambda stuck: (follows(stuck), stuck.disagreement.startswith("order"), stuck.since_ns))
        return found

    def _examine(self, stuck: _Stuck) -> bool:
        """Fill in who waits and who is absent. Returns whether the call is stuck."""
        state = self._calls["state"]
        stuck.disagreement = self._disagreements.describe(stuck.calls.values())
        members = [self._last.member_of_rank.get(rank) for rank in stuck.channel.ranks]
        absent = [member for member in members if member is not None and member not in stuck.calls]
        if None in members or not all(self._never_came(member, stuck) for member in absent):
            if not stuck.disagreement:
                return False
            absent = []
        in_call = [
            member
            for member, call in stuck.calls.items()
            if state[call] != State.COMPLETE and self._stays(member, call)
        ]
        if not any(member.proves for member in in_call):
            # Complete, or left: nobody waits, but the ranks may have disagreed.
            stuck.absent = absent
            stuck.since_ns = max(map(self._last.began, stuck.calls.values()))
            return bool(stuck.disagreement) and self._identified(stuck)
        concerned = {*absent, *in_call}
        outlived_ns = max(member.alive_ns for member in in_call) - OUTLIVED_NS
        dead = {member for member in concerned if member.end == "died" and member.alive_ns < outlived_ns}
        failures = {member for member in in_call if state[stuck.calls[member]] == State.FAILED}
        killed = self._only_death if failures else None
        if killed in concerned - failures:
            dead = {killed}
        stuck.absent = {*absent, *dead}
        stuck.waiting = [member for member in in_call if member not in dead]
        if not stuck.waiting:
            return False
        stuck.since_ns = min(self._last.began(stuck.calls[member]) for member in stuck.waiting)
        waits = [self._waited(member, stuck) for member in stuck.waiting]
        stuck.waited_ns = max(waits) if stuck.absent else min(waits)
        pauses = [member.longest_pause(stuck.since_ns) for member in (*stuck.calls, *stuck.absent)]
        long = stuck.waited_ns >= max(MIN_WAIT_NS, FACTOR * max(pauses))
        if long and not stuck.disagreement:  # before that, the message with the other tag may be the next but one
            stuck.disagreement = self._tags(stuck, absent) or self._communicators(stuck)
        return long or killed in dead or (bool(stuck.disagreement) and self._identified(stuck))

    @cached_property
    def _only_death(self) -> Member | None:
        """The process that did not close its log, if all others closed theirs; a launcher ends all or none of them."""
        not_closed = [member for member in self._last.members if member.end != "exit"]
        return not_closed[0] if [member.end for member in not_closed] == ["died"] else None

    def _tags(self, stuck: _Stuck, absent: Sequence[Member]) -> str:
        """Return which tag a sender used that a receive does not take, "" if it sent nothing else."""
        call, tags = stuck.example, self._calls["tag"]
        if not absent or self._last.text("op", call) != "recv" or tags[call] < 0:
            return ""
        sent = {*tags[self._unreceived(absent[0], call)].tolist()} - {int(tags[call])}
        others = f"{', '.join(map(str, sorted(sent)))} on rank {absent[0].rank}"
        return f"tag: {tags[call]} on rank {self._last.member(call).rank}, {others}" if sent else ""

    def _identified(self, stuck: _Stuck) -> bool:
        """Return whether the group of a call is the same on all ranks for certain.

        Communicators of MPI with the same ranks and without names are told apart by the order of their first use.
        """
        collective = stuck.channel.source < 0 and stuck.number != NOT_MATCHED
        unnamed = collective and not stuck.channel.group.name
        return not unnamed or self._last.text("api", stuck.example) != "mpi"

    def _communicators(self, stuck: _Stuck) -> str:
        """Return that ranks are perhaps in different communicators, "" if not."""
        sites = {self._last.text("site", call) for call in stuck.calls.values()}
        if stuck.absent or self._identified(stuck) or len(sites) == 1:
            return ""
        return "communicator: perhaps not the same, as they have no names and the call sites differ"

    def _stays(self, member: Member, call: int) -> bool:
        """Return whether a process is still in a call, or ended in it; not if it left by itself or went on for long."""
        failed = self._calls["state"][call] == State.FAILED
        if not member.has_times or (member.end == "exit" and not failed):
            return False
        following = member.next_begin(self._last.began(call))
        return following is None or member.quiet_ns - following < MIN_WAIT_NS

    def _waited(self, member: Member, stuck: _Stuck) -> int:
        """Return for how long a process was in a call at least, and did nothing else."""
        call = stuck.calls[member]
        if self._calls["state"][call] != State.FAILED:
            return member.alive_ns - member.quiet_ns
        # When it failed is not known: before the process's next call, and an absent rank was there all the time.
        there = max((other.alive_ns for other in stuck.absent), default=0)
        following = member.next_begin(self._last.began(call)) or member.alive_ns
        return min(member.alive_ns, there, following) - self._last.began(call)

    def _never_came(self, member: Member, stuck: _Stuck) -> bool:
        """Return whether the log of a process proves that it did not make a call."""
        calls, at = self._calls, member.at
        if not member.proves:
            return False
        if stuck.number == NOT_MATCHED:
            tag, sent = calls["tag"][stuck.example], calls["tag"][self._unreceived(member, stuck.example)]
            return not (len(sent) if tag < 0 else (sent == tag).any())
        instance = calls["instance"][at]
        instance = instance[instance != NOT_MATCHED]
        seqs = calls.seq[instance[calls.channel[instance] == stuck.number]]
        if len(seqs):
            return stuck.seq is not None and int(seqs.max()) < stuck.seq
        if member.removed or not member.has_all_records:
            return False
        # Receives of any source or tag that are still open may be of this channel.
        channel = stuck.channel
        may_be = calls.has_label("op", "recv")[at] & (calls["instance"][at] == NOT_MATCHED)
        may_be &= np.isin(calls["peer"][at], (-1, channel.source)) & np.isin(calls["tag"][at], (-1, channel.tag))
        may_be &= calls["state"][at] != State.COMPLETE
        return not (channel.source >= 0 and channel.destination == member.rank and may_be.any())

    def _unreceived(self, member: Member, receive: int) -> Array:
        """Return the sends of a process to the rank and in the group of a receive that no receive is matched with."""
        calls, at = self._calls, member.at
        sent = calls.has_label("op", "send")[at] & (calls["peer"][at] == self._last.member(receive).rank)
        sent &= calls["group"][at] == calls["group"][receive]
        positions = at.start + np.flatnonzero(sent)
        received = np.append(calls.complete, False)  # the last one for NOT_MATCHED
        return np.asarray(positions[~received[calls["instance"][positions]]])

    def _order(self, stuck: _Stuck, waits_in: Mapping[Member, _Stuck]) -> str:
        absent = sorted((member for member in stuck.absent if member in waits_in), key=lambda member: member.rank)
        names = [f"rank {member.rank} is in {self._last.name(waits_in[member].calls[member])}" for member in absent]
        return f"order: {', '.join(names)}, which waits in turn"


def _waits_for_itself(stuck: _Stuck, waits_in: Mapping[Member, _Stuck]) -> bool:
    """Return whether the absent ranks of a call wait for others, and these for others, back to this call."""
    seen: set[Member] = set()
    reached = [*stuck.absent]
    while reached:
        member = reached.pop()
        if member in waits_in and member not in seen:
            seen.add(member)
            reached += waits_in[member].absent
    return not seen.isdisjoint(stuck.waiting)


def find_stuck_calls(run: RecordedRun) -> NamedTables:
    """Return the tables `stuck_calls` and `stuck_ranks` of a run."""
    calls, ranks = [], []
    if not run.simulated and any(map(_is_suspicious, run.processes)):
        last = LastCalls(run)
        for number, stuck in enumerate(_Examination(last).stuck_calls()):
            calls.append(_call_row(last, stuck))
            ranks += [*_rank_rows(last, stuck, number)]
    rows = {"stuck_calls": calls, "stuck_ranks": ranks}
    tables = {name: pd.DataFrame(table, columns=TABLES[name].column_names) for name, table in rows.items()}
    return {name: table.astype(_TYPES[name]) for name, table in tables.items()}


_TYPES: Final = {"stuck_calls": {"seq": "Int64"}, "stuck_ranks": {"begin_ns": "Int64"}}


def _is_suspicious(process: Process) -> bool:
    """Return whether a process may have a stuck call: it did not close its log, or one of its last calls failed."""
    if process.tables.end is None:
        return True
    last = (*last_records(process.segments, 1024), *([process.kept.last(1024)] if process.kept else []))
    wanted = {"state": [State.FAILED.name.lower()]}
    blocks = (records for segment in last for records in segment.blocks(wanted=wanted))
    return any(bool((records["state"] == State.FAILED).any()) for records in blocks)


def _call_row(last: LastCalls, stuck: _Stuck) -> dict[str, object]:
    shown = [stuck.calls[member] for member in stuck.waiting if member in stuck.calls] or [*stuck.calls.values()]
    ops = [last.text("op", call) for call in shown]
    return {
        "op": max(dict.fromkeys(ops), key=ops.count),
        "group_ranks": format_ranks(stuck.channel.ranks),
        "seq": stuck.seq,
        "waiting_ranks": format_ranks(member.rank for member in stuck.waiting),
        "absent_ranks": format_ranks(member.rank for member in stuck.absent),
        "disagreement": stuck.disagreement,
        "since_ns": stuck.since_ns,
        "waited_ns": max(0, stuck.waited_ns),
        "site": last.sites(shown),
    }


def _rank_rows(last: LastCalls, stuck: _Stuck, number: int) -> Iterator[dict[str, object]]:
    """Yield where each rank of a stuck call is: in it, or at its last call."""
    for member in sorted({*stuck.calls, *stuck.absent}, key=lambda member: member.rank):
        call = stuck.calls.get(member, member.last_call)
        yield {
            "stuck_call": number,
            "rank": member.rank,
            "part": "waiting" if member in stuck.waiting else "absent" if member in stuck.absent else "done",
            "call": None if call is None else last.name(call),
            "state": None if call is None else State(int(last.calls["state"][call])).name.lower(),
            "begin_ns": None if call is None else last.began(call),
            "site": "" if call is None else last.sites([call]),
            "end": member.end,
            "alive_ns": member.alive_ns,
        }


ANALYSIS: Final = RunAnalysis("stuck_calls", find_stuck_calls)
"""Reads the last records itself, and none of a run whose processes all closed their logs without a failed call."""
