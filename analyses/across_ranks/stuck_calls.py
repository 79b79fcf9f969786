"""Stuck calls: which ranks wait in them, which ranks are absent, and what ranks disagree about.

The log of an interrupted job looks like that of a job that hangs: calls are in flight, and ranks
are at different calls. A call is stuck if one of these holds:

* Waiting: a rank has been in the call, and has done nothing else, for `MIN_WAIT_NS` and for
  `FACTOR` times the longest earlier pause between two calls of the ranks concerned, without times
  in which a process was stopped. A rank that computes for that long is reported as absent,
  because the log shows no more.
* Death: one process did not close its log, all others did, and a call that needed it failed on one
  of them. In a call that is stuck for the reason above, a rank that died before the others counts
  as absent, too.
* Disagreement: the n-th calls of the ranks on a group are different operations, or the same
  operation with different sizes, types or roots.

A rank is absent only if its log proves it: the log is complete (closed, recovered, or read from the
memory of a process that still runs), nothing in it is missing or damaged, and it has no call with
this number or a later one in the channel. Ranks whose logs prove nothing are not reported, nor are
ranks that left together with the ranks that they waited for.

A run is examined only if a process did not close its log or has a failed call. Only the last
records are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np
import pandas as pd

from commtrace.analyses.fold_engine import Analysis, NamedTables
from commtrace.analyses.grouping import Array, merge_sums, positions_by_value
from commtrace.analyses.record_blocks import RecordBlock
from commtrace.analyses.table_specs import shared_columns as shared
from commtrace.analyses.table_specs.spec import TableSpec, column, duration, text_column, word_column
from commtrace.formatting import format_count, format_moment
from commtrace.rank_ranges import format_ranks
from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.segment_reader import last_records
from commtrace.schema import Flag, State

from .disagreements import COMMUNICATOR, ORDER, TAG, Disagreement, Disagreements
from .last_calls import MAX_RECORDS, LastCalls, Member
from .matching import NOT_MATCHED, Channel

STUCK_CALLS: Final = TableSpec("stuck_calls", "Calls that do not end",
    "A row per stuck call, those that others wait for first. No rows if the run ended, or was interrupted, without "
    "one.", (
    shared.OP,
    shared.ranks_column("group_ranks", "ranks", "Ranks that the call needs: of the group, or sender and receiver."),
    column("", format_count, "seq", "number",
        "Sequence number in its group, or for its sender, receiver and tag, from 0; missing for a receive from any "
        "source or with any tag.", optional=True),
    shared.ranks_column("waiting_ranks", "waiting", "Ranks that are in the call."),
    shared.ranks_column("absent_ranks", "absent", "Ranks that did not enter it, or ended in it."),
    text_column("disagreement", "disagreement",
        '"operation", "size", "dtype", "root", "tag", "communicator" or "order", and how; "" if the ranks agree.',
        optional=True),
    column("ns", format_moment, "since_ns", "since",
        "When the first waiting rank entered it, since 1970-01-01 UTC.", optional=True),
    duration("waited_ns", "for", "Lower bound of the time that a rank waited; 0 if none waits."),
    replace(shared.SITE, meaning='Call site of the ranks that are in it; "" if it was not recorded.'),
), merge_by="group_ranks")  # fmt: skip
STUCK_RANKS: Final = TableSpec("stuck_ranks",
    "Ranks of calls that do not end", "A row per stuck call and rank that it needs.", (
    column("", str, "stuck_call", "call", "Row of the call in `stuck_calls`, from 0."),
    shared.RANK,
    word_column("part", "part", '"waiting": in it; "absent": not in it, or ended in it; "done": completed it.'),
    text_column("call", "last call", "The call, or the last one of a rank that did not enter it."),
    word_column("state", "state", "State of that call; missing if the rank made no call."),
    column("ns", format_moment, "begin_ns", "since", "When it began, since 1970-01-01 UTC.", optional=True),
    replace(shared.SITE, optional=True),
    word_column("end", "process",
        '"runs": it ran when the report was made; "exit": it closed its log; "died": it did not; "unknown": it '
        "runs, or died, on another host."),
    column("ns", format_moment, "alive_ns", "last seen", "When the process was last known to be alive.", optional=True),
), merge_by="rank")  # fmt: skip
_SPECS: Final = {spec.name: spec for spec in (STUCK_CALLS, STUCK_RANKS)}

MIN_WAIT_NS: Final = 5_000_000_000
"""Minimum time for which a stuck call is in flight."""
FACTOR: Final = 2
"""Minimum ratio of that time to the longest earlier pause."""
OUTLIVED_NS: Final = 1_000_000_000
"""Maximum time between the ends of processes that are ended together."""


@dataclass
class _StuckCall:
    """A call that is not complete."""

    channel: Channel
    number: int
    """Position in `MatchedCalls.channels`; NOT_MATCHED for a receive from any source or tag."""
    seq: int | None
    calls: dict[Member, int]
    """The call of each process that made one."""
    waiting: list[Member] = field(default_factory=list)
    """Processes that wait in it."""
    absent: Collection[Member] = ()
    """Processes that did not make it, or died in it."""
    disagreements: Sequence[Disagreement] = ()
    since_ns: int = 0
    waited_ns: int = 0

    @property
    def is_about_order(self) -> bool:
        """Whether its ranks wait for each other in a circle."""
        return any(disagreement.subject == ORDER for disagreement in self.disagreements)

    @property
    def example(self) -> int:
        """One of the calls."""
        return next(iter(self.calls.values()))


def _candidates(last: LastCalls, disagree: Array) -> Iterator[_StuckCall]:
    """Yield the first call of each channel that is not complete, and the first with a disagreement.

    Args:
        last: The last calls of the run.
        disagree: Whether the calls of each instance disagree, shape (instances,).
    """
    calls, state = last.calls, last.calls["state"]
    # A process is, or was, blocked in the call: it did not return, is waited for, or failed.
    awaited = (state == State.RETURNED) & ((calls["t_wait"] > 0) | ((calls["flags"] & Flag.ASYNC) == 0))
    blocked = (state == State.BEGUN) | (state == State.FAILED) | awaited
    at, instance = calls.matched, calls["instance"][calls.matched]
    completed, in_call = (
        np.bincount(instance[which[at]], minlength=len(calls.channel)) for which in (state == State.COMPLETE, blocked)
    )
    # An instance lacks a rank if a rank of its channel has no call with its number or a later one.
    channel_of, processes = calls.channel, len(last.members)
    users, user = np.unique(channel_of[instance] * processes + calls["process"][at], return_inverse=True)
    highest = np.full(len(users), -1)
    np.maximum.at(highest, user, calls.seq[instance])
    lowest = np.full(len(calls.channels), np.iinfo(np.int64).max)
    np.minimum.at(lowest, users // processes, highest)
    ranks = np.array([len({*channel.ranks}) for channel in calls.channels], np.int64)
    lowest[np.bincount(users // processes, minlength=len(ranks)) < ranks] = -1
    lacking = (calls.present < calls.expected) & (calls.seq > lowest[channel_of]) & (calls.present > completed)
    all_in_call = calls.complete & (completed == 0) & (in_call > 0)
    wanted = [np.flatnonzero(which) for which in (lacking | all_in_call, disagree)]
    # Instances are sorted by channel and number.
    chosen = np.concatenate([which[np.unique(channel_of[which], return_index=True)[1]] for which in wanted])
    at = at[np.isin(instance, chosen)]
    for number, rows in positions_by_value(calls["instance"][at]).items():
        channel = int(channel_of[number])
        members = {last.member(call): call for call in at[rows].tolist()}
        yield _StuckCall(calls.channels[channel], channel, int(calls.seq[number]), members)
    # Receives in flight without a source or tag are in no channel.
    of_any = calls.has_label("op", "recv") & (calls["instance"] == NOT_MATCHED) & blocked
    for call in np.flatnonzero(of_any).tolist():
        member, peer, tag = last.member(call), int(calls["peer"][call]), int(calls["tag"][call])
        if group := last.groups.get(last.text("group", call)):
            addresses = (peer, member.rank, tag) if peer >= 0 else ()
            yield _StuckCall(Channel(group, *addresses), NOT_MATCHED, None, {member: call})


class _StuckCallSearch:
    """Search for stuck calls among the last calls of a run."""

    def __init__(self, last: LastCalls) -> None:
        self._last, self._calls = last, last.calls
        self._disagreements = Disagreements(last)

    def stuck_calls(self) -> list[_StuckCall]:
        """Return the stuck calls, first those that others wait for."""
        candidates = _candidates(self._last, self._disagreements.of_instances)
        stuck_calls = [stuck for stuck in candidates if self._examine(stuck)]
        waits_in = {member: stuck for stuck in stuck_calls for member in stuck.waiting}
        for stuck in stuck_calls:
            if not stuck.disagreements and _waits_for_itself(stuck, waits_in):
                stuck.disagreements = [self._order(stuck, waits_in)]

        def follows(stuck: _StuckCall) -> bool:
            return not stuck.disagreements and any(member in waits_in for member in stuck.absent)

        stuck_calls.sort(key=lambda stuck: (follows(stuck), stuck.is_about_order, stuck.since_ns))
        return stuck_calls

    def _examine(self, stuck: _StuckCall) -> bool:
        """Fill in the waiting and absent processes. Return whether the call is stuck."""
        state = self._calls["state"]
        stuck.disagreements = self._disagreements.of_calls(stuck.calls.values())
        members = [self._last.member_of_rank.get(rank) for rank in stuck.channel.ranks]
        absent = [member for member in members if member is not None and member not in stuck.calls]
        if None in members or not all(self._never_came(member, stuck) for member in absent):
            if not stuck.disagreements:
                return False
            absent = []
        in_call = [
            member
            for member, call in stuck.calls.items()
            if state[call] != State.COMPLETE and self._stays(member, call)
        ]
        if not any(member.proves for member in in_call):
            # The call is complete, or its ranks left it: none waits, but they may have disagreed.
            stuck.absent = absent
            stuck.since_ns = max(map(self._last.began, stuck.calls.values()))
            return bool(stuck.disagreements) and self._identified(stuck)
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
        if long and not stuck.disagreements:  # if shorter, the right message may still follow
            stuck.disagreements = self._tags(stuck, absent) or self._communicators(stuck)
        return long or killed in dead or (bool(stuck.disagreements) and self._identified(stuck))

    @cached_property
    def _only_death(self) -> Member | None:
        """The only process that did not close its log, if it died: a launcher ends all or none."""
        not_closed = [member for member in self._last.members if member.end != "exit"]
        return not_closed[0] if [member.end for member in not_closed] == ["died"] else None

    def _tags(self, stuck: _StuckCall, absent: Sequence[Member]) -> list[Disagreement]:
        """Return the tag of a receive and those that the sender used instead; nothing if there are none."""
        call, tags = stuck.example, self._calls["tag"]
        if not absent or self._last.text("op", call) != "recv" or tags[call] < 0:
            return []
        sent = {*tags[self._unreceived(absent[0], call)].tolist()} - {int(tags[call])}
        expected = str(tags[call]), [self._last.member(call).rank]
        used = ", ".join(map(str, sorted(sent))), [absent[0].rank]
        return [Disagreement(TAG, [expected, used])] if sent else []

    def _identified(self, stuck: _StuckCall) -> bool:
        """Return whether the group of a call is certainly the same on all ranks.

        Unnamed MPI communicators with the same ranks are distinguished by the order of their first
        use.
        """
        collective = stuck.channel.source < 0 and stuck.number != NOT_MATCHED
        unnamed = collective and not stuck.channel.group.name
        return not unnamed or self._last.text("api", stuck.example) != "mpi"

    def _communicators(self, stuck: _StuckCall) -> list[Disagreement]:
        """Return a disagreement if ranks may be in different communicators."""
        sites = {self._last.text("site", call) for call in stuck.calls.values()}
        if stuck.absent or self._identified(stuck) or len(sites) == 1:
            return []
        return [Disagreement(COMMUNICATOR)]

    def _stays(self, member: Member, call: int) -> bool:
        """Return whether a process is still in a call, or ended in it.

        It is not if it left the call by itself, or made further calls for at least MIN_WAIT_NS.
        """
        failed = self._calls["state"][call] == State.FAILED
        if not member.has_times or (member.end == "exit" and not failed):
            return False
        following = member.next_begin(self._last.began(call))
        return following is None or member.quiet_ns - following < MIN_WAIT_NS

    def _waited(self, member: Member, stuck: _StuckCall) -> int:
        """Return the minimum time for which a process was in a call and did nothing else, ns."""
        call = stuck.calls[member]
        if self._calls["state"][call] != State.FAILED:
            return member.alive_ns - max(member.quiet_ns, member.resumed_ns)
        # The time of the failure is not known: it was before the process's next call. Only time in
        # which an absent rank was alive counts.
        absent_alive_ns = max((other.alive_ns for other in stuck.absent), default=0)
        following = member.next_begin(self._last.began(call)) or member.alive_ns
        return min(member.alive_ns, absent_alive_ns, following) - self._last.began(call)

    def _never_came(self, member: Member, stuck: _StuckCall) -> bool:
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
        # Open receives from any source or with any tag may belong to this channel.
        channel = stuck.channel
        may_be = calls.has_label("op", "recv")[at] & (calls["instance"][at] == NOT_MATCHED)
        may_be &= np.isin(calls["peer"][at], (-1, channel.source)) & np.isin(calls["tag"][at], (-1, channel.tag))
        may_be &= calls["state"][at] != State.COMPLETE
        return not (channel.source >= 0 and channel.destination == member.rank and may_be.any())

    def _unreceived(self, member: Member, receive: int) -> Array:
        """Return the unmatched sends of a process to the rank of a receive, in its group."""
        calls, at = self._calls, member.at
        sent = calls.has_label("op", "send")[at] & (calls["peer"][at] == self._last.member(receive).rank)
        sent &= calls["group"][at] == calls["group"][receive]
        positions = at.start + np.flatnonzero(sent)
        received = np.append(calls.complete, False)  # the last value is for NOT_MATCHED
        return np.asarray(positions[~received[calls["instance"][positions]]])

    def _order(self, stuck: _StuckCall, waits_in: Mapping[Member, _StuckCall]) -> Disagreement:
        absent = sorted((member for member in stuck.absent if member in waits_in), key=lambda member: member.rank)
        names = [(self._last.name(waits_in[member].calls[member]), [member.rank]) for member in absent]
        return Disagreement(ORDER, names)


def _waits_for_itself(stuck: _StuckCall, waits_in: Mapping[Member, _StuckCall]) -> bool:
    """Return whether the absent ranks of a call wait for its waiting ranks, perhaps via others."""
    seen: set[Member] = set()
    reached = [*stuck.absent]
    while reached:
        member = reached.pop()
        if member in waits_in and member not in seen:
            seen.add(member)
            reached += waits_in[member].absent
    return not seen.isdisjoint(stuck.waiting)


def find_stuck_calls(
    run: RecordedRun, failed: Collection[int] | None = None, most_records: int = MAX_RECORDS
) -> NamedTables:
    """Return the tables `stuck_calls` and `stuck_ranks` of a run.

    Args:
        run: The run.
        failed: Processes that have a failed call, by their index in the log; None: look at their last calls.
        most_records: Number of last records, over all processes, that are read.
    """
    calls, ranks = [], []
    if not run.simulated and any(_is_suspicious(run, number, failed) for number in range(len(run.processes))):
        last = LastCalls(run, most_records)
        stuck_calls = _StuckCallSearch(last).stuck_calls()
        # Only then, because it takes as long as the search: the order of the ends of processes may be another.
        if stuck_calls and last.align():
            stuck_calls = _StuckCallSearch(last).stuck_calls()
        for number, stuck in enumerate(stuck_calls):
            calls.append(_call_row(last, stuck))
            ranks += [*_rank_rows(last, stuck, number)]
    rows = {"stuck_calls": calls, "stuck_ranks": ranks}
    tables = {name: pd.DataFrame(table, columns=_SPECS[name].column_names) for name, table in rows.items()}
    return {name: table.astype(_TYPES[name]) for name, table in tables.items()}


_TYPES: Final = {"stuck_calls": {"seq": "Int64"}, "stuck_ranks": {"begin_ns": "Int64"}}


def _is_suspicious(run: RecordedRun, number: int, failed: Collection[int] | None) -> bool:
    """Return whether a process may have a stuck call: it did not close its log, or it has a failed call."""
    process = run.processes[number]
    if process.tables.end is None:
        return True
    kept = () if process.kept is None else (process.kept.last(_LAST),)
    last = (*(last_records(process.segments, _LAST) if failed is None else ()), *kept)
    wanted = {"state": [State.FAILED.name.lower()]}
    blocks = (records for segment in last for records in segment.blocks(wanted=wanted))
    return number in (failed or ()) or any(bool((records["state"] == State.FAILED).any()) for records in blocks)


_LAST: Final = 1024
"""Number of last records of a process among which a failed call is searched for."""


def _call_row(last: LastCalls, stuck: _StuckCall) -> dict[str, object]:
    shown = [stuck.calls[member] for member in stuck.waiting if member in stuck.calls] or [*stuck.calls.values()]
    ops = [last.text("op", call) for call in shown]
    return {
        "op": max(dict.fromkeys(ops), key=ops.count),
        "group_ranks": format_ranks(stuck.channel.ranks),
        "seq": stuck.seq,
        "waiting_ranks": format_ranks(member.rank for member in stuck.waiting),
        "absent_ranks": format_ranks(member.rank for member in stuck.absent),
        "disagreement": "; ".join(map(str, stuck.disagreements)),
        "since_ns": stuck.since_ns,
        "waited_ns": max(0, stuck.waited_ns),
        "site": last.sites(shown),
    }


def _rank_rows(last: LastCalls, stuck: _StuckCall, number: int) -> Iterator[dict[str, object]]:
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


def _failed_calls(block: RecordBlock) -> pd.DataFrame:
    """Return the number of failed calls of each process that has one."""
    calls = np.bincount(block["process"][block["state"] == State.FAILED])
    process = np.flatnonzero(calls)
    return pd.DataFrame({"process": process, "failed": calls[process]})


def _finish(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    return find_stuck_calls(run, {*table["process"].tolist()})


ANALYSIS: Final = Analysis("stuck_calls", _failed_calls, merge_sums("process"), _finish)
"""It reads the last records again, unless all processes closed their logs without a failed call."""
