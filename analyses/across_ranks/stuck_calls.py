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

Of a process whose log has only some steps, the records that it kept besides are examined (`Process.kept`).

Only logs in which a process did not close its log or has a failed call are examined, and of these the last records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

from commtrace.analyses.coverage import FILE_PROBLEMS
from commtrace.analyses.fold_engine import NamedTables, without_records
from commtrace.analyses.grouping import Array
from commtrace.analyses.table_specs import TABLES
from commtrace.formatting import MAX_SINGLE, format_count, format_ranks, shorten_ranks
from commtrace.reading.labels import UNKNOWN, group_label
from commtrace.reading.process_reader import Process
from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.segment_reader import BLOCK, MemorySegment, Segment, last_records
from commtrace.reading.table_reader import integer_or_none
from commtrace.recording.recovery import record_keys
from commtrace.schema import DEVICE_CLOCKS, RECORD, WITHOUT_RECORD, Flag, State

from .dependencies import clock_error_ns
from .matching import NOT_MATCHED, Channel, MatchedCalls, match_calls

MIN_WAIT_NS: Final = 5_000_000_000
"""Least time for which a call is in flight before it is called stuck."""
FACTOR: Final = 2
"""Least ratio of that time to the longest pause that the run had before."""
OUTLIVED_NS: Final = 1_000_000_000
"""Time by which processes that are ended together may differ."""
MAX_RECORDS: Final = 1 << 20
"""Records that are read, over all processes; of each at least MIN_RECORDS."""
MIN_RECORDS: Final = 256

_FIELDS: Final = ("t_begin", "t_return", "t_wait", "t_end", "payload", "peer", "tag", "state", "flags", "seq")
_LABELS: Final = ("op", "dtype", "api", "group", "group_ranks", "site")
_TIMES: Final = ("t_begin", "t_return", "t_wait", "t_end")
_SAME_SIZE: Final = ("all_reduce", "reduce", "broadcast", "scan", "exscan")
"""Operations whose payload is the same on every rank of the group."""
_SAME_SIZE_TORCH: Final = (*_SAME_SIZE, "all_gather", "reduce_scatter", "send", "recv")
_SAME_DTYPE: Final = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan")
_SAME_DTYPE_TORCH: Final = (*_SAME_DTYPE, "all_gather")
_ROOTED: Final = ("broadcast", "reduce", "gather", "scatter")
_OWN_SIZES: Final = Flag.OBJECT | Flag.UNEVEN | Flag.SPARSE
_NO_TIME: Final = np.iinfo(np.int64).min


class _Member:
    """What the log says of one process."""

    def __init__(self, process: Process, offset: int | None, *, damaged: bool) -> None:
        tables, stats = process.tables, process.tables.stats or {}
        counters = {name: integer_or_none(stats.get(name)) or 0 for name in (*WITHOUT_RECORD, "hook_errors")}
        end = tables.end
        self.rank, self.offset, self.has_times = process.rank, offset or 0, offset is not None
        self.removed = counters.pop("removed") > 0
        self.closed = end is not None
        self.runs = not self.closed and process.seen_alive_ns > 0
        self.died = not self.closed and not self.runs and bool(tables.salvage)
        whole = self.runs or self.died or (end is not None and end.get("reason") == "exit")
        lacks_steps = process.kept is None and (process.not_selected > 0 or process.summary is not None)
        self.proves = whole and not damaged and not lacks_steps and not any(counters.values()) and self.has_times
        moments = [stats.get("mono_ns"), (end or {}).get("mono_ns"), *(row.get("mono_ns") for row in tables.clock)]
        self.alive_ns = max(process.seen_alive_ns, *(integer_or_none(moment) or 0 for moment in moments)) + self.offset
        self.quiet_ns = _NO_TIME
        """Its last event: the start, return or end of any of its calls."""
        self.begins = np.zeros(0, np.int64)
        """When its calls began, ascending."""

    @property
    def end(self) -> str:
        """How it ended, as a table shows it."""
        return "exit" if self.closed else "runs" if self.runs else "died" if self.died else "unknown"

    def observe(self, times: Mapping[str, Array]) -> None:
        """Take the times of its calls, in wall-clock ns, 0 where not known."""
        self.begins = np.sort(times["t_begin"])
        self.quiet_ns = max((int(column.max(initial=_NO_TIME)) for column in times.values()), default=_NO_TIME)
        self.alive_ns = max(self.alive_ns, self.quiet_ns)

    def longest_pause(self, before: int) -> int:
        """Return the longest time between two calls that began up to a moment."""
        begins = self.begins[: np.searchsorted(self.begins, before, "right")]
        return int(np.diff(begins).max(initial=0))

    def next_begin(self, after: int) -> int | None:
        """Return when its next call began."""
        at = int(np.searchsorted(self.begins, after, "right"))
        return int(self.begins[at]) if at < len(self.begins) else None


@dataclass
class _Stuck:
    """A call that is not complete. Positions are those of calls in `MatchedCalls`, one for each rank."""

    channel: Channel
    number: int
    """Position of the channel in `MatchedCalls.channels`; NOT_MATCHED: none, of a receive of any source or tag."""
    seq: int | None
    calls: dict[int, int]
    """Position of the call of each process that made it."""
    waiting: list[int] = field(default_factory=list)
    """Processes that wait in it."""
    absent: list[int] = field(default_factory=list)
    """Processes that did not make it, or died in it."""
    disagreement: str = ""
    since_ns: int = 0
    waited_ns: int = 0


class _Examination:
    """The last calls of the run, and which of them are stuck."""

    def __init__(self, run: RecordedRun) -> None:
        count = max(MIN_RECORDS, min(BLOCK, MAX_RECORDS // max(1, len(run.processes))))
        tail = RecordedRun(replace(run.log, processes=tuple(_last(process, count) for process in run.processes)))
        self.calls: MatchedCalls = match_calls(tail, [*_FIELDS, *_LABELS])
        self.whole = [
            old.kept is None and sum(s.count for s in old.segments) == sum(s.count for s in new.segments)
            for old, new in zip(run.processes, tail.processes, strict=True)
        ]
        unsafe = {_stem(note.path) for note in run.log.notes if note.kind in FILE_PROBLEMS}
        self.members = [
            _Member(
                process,
                offset,
                damaged=_is_damaged(process) or _stem(process.path) in unsafe,
            )
            for process, offset in zip(tail.processes, tail.labels.clock_offsets, strict=True)
        ]
        process = self.calls["process"]
        starts = np.searchsorted(process, np.arange(len(self.members) + 1))
        self.groups = [[*process.tables.groups.values()] for process in tail.processes]
        self.of = [slice(int(a), int(b)) for a, b in pairwise(starts)]
        for member, at in zip(self.members, self.of, strict=True):
            columns = {name: self.calls[name][at].astype(np.int64) for name in _TIMES}
            member.observe({name: column[column > 0] + member.offset for name, column in columns.items()})
        self.by_rank: dict[int, int] = {}
        for number, member in enumerate(self.members):
            # Of two processes of one rank, neither proves anything.
            if (other := self.by_rank.setdefault(member.rank, number)) != number:
                member.proves = self.members[other].proves = False

    # ---- one call --------------------------------------------------------------------------------------------------

    def text(self, column: str, call: int) -> str:
        """Return the label of a call."""
        return str(self.calls.categories[column][self.calls[column][call]])

    def _is(self, column: str, labels: Sequence[str]) -> Array:
        """Return whether the label of each call is one of these."""
        result: Array = np.isin(self.calls.categories[column].astype(str), labels)[self.calls[column]]
        return result

    def began(self, call: int) -> int:
        """Return when a call began, in wall-clock ns."""
        return int(self.calls["t_begin"][call]) + self.members[int(self.calls["process"][call])].offset

    @cached_property
    def blocked(self) -> Array:
        """Whether each call is one that somebody is, or was, in: it did not return, is waited for, or failed."""
        state, waits = self.calls["state"], self.calls["t_wait"] > 0
        awaited = (state == State.RETURNED) & (waits | ((self.calls["flags"] & Flag.ASYNC) == 0))
        return np.asarray((state == State.BEGUN) | (state == State.FAILED) | awaited)

    # ---- candidates ------------------------------------------------------------------------------------------------

    @cached_property
    def _instance_calls(self) -> tuple[Array, Array]:
        """Positions of the matched calls by instance, and where each instance begins in them."""
        at = self.calls.matched
        order = at[np.argsort(self.calls["instance"][at], kind="stable")]
        return order, np.searchsorted(self.calls["instance"][order], np.arange(len(self.calls.channel) + 1))

    def _calls_of(self, instance: int) -> dict[int, int]:
        order, starts = self._instance_calls
        at = order[starts[instance] : starts[instance + 1]].tolist()
        return {int(self.calls["process"][call]): call for call in at}

    def candidates(self) -> Iterator[_Stuck]:
        """Yield the first call of each channel that is not complete, and the first with a disagreement."""
        calls, state = self.calls, self.calls["state"]
        at, instance = calls.matched, calls["instance"][calls.matched]
        size = len(calls.channel)
        done = np.bincount(instance[state[at] == State.COMPLETE], minlength=size)
        blocked = np.bincount(instance[self.blocked[at]], minlength=size)
        # An instance lacks a rank if a rank of its channel has no call of its number or above.
        channel, processes = calls.channel, len(self.members)
        users, user = np.unique(channel[instance] * processes + calls["process"][at], return_inverse=True)
        last = np.full(len(users), -1)
        np.maximum.at(last, user, calls.seq[instance])
        lowest = np.full(len(calls.channels), np.iinfo(np.int64).max)
        np.minimum.at(lowest, users // processes, last)
        ranks = np.array([len(set(one.ranks)) for one in calls.channels], np.int64)
        lowest[np.bincount(users // processes, minlength=len(ranks)) < ranks] = -1
        lacking = (calls.present < calls.expected) & (calls.seq > lowest[channel]) & (calls.present > done)
        everyone = calls.complete & (done == 0) & (blocked > 0)
        chosen: set[int] = set()
        for wanted in (lacking | everyone, self._disagrees()):
            positions = np.flatnonzero(wanted)
            _, first = np.unique(channel[positions], return_index=True)  # instances are sorted by channel and number
            chosen.update(positions[first].tolist())
        for number in sorted(chosen):
            at_channel = int(channel[number])
            yield _Stuck(calls.channels[at_channel], at_channel, int(calls.seq[number]), self._calls_of(number))
        yield from self._receives_of_any()

    def _receives_of_any(self) -> Iterator[_Stuck]:
        """Yield receives in flight that name no source or no tag, which are in no channel."""
        calls = self.calls
        of_any = self._is("op", ("recv",)) & (calls["instance"] == NOT_MATCHED) & self.blocked
        for call in np.flatnonzero(of_any).tolist():
            process, peer, tag = (int(calls[name][call]) for name in ("process", "peer", "tag"))
            group = next((g for g in self.groups[process] if group_label(g) == self.text("group", call)), None)
            if group is not None:
                rank = self.members[process].rank
                channel = Channel(group) if peer < 0 else Channel(group, peer, rank, tag)
                yield _Stuck(channel, NOT_MATCHED, None, {process: call})

    def _disagrees(self) -> Array:
        """Return whether the calls of each instance disagree, bool, shape (instances,)."""
        result = np.zeros(len(self.calls.channel), bool)
        for column, mask in self._compared.values():
            lowest = self.calls.smallest(np.where(mask, column, np.iinfo(np.int64).max))
            result |= lowest < self.calls.largest(np.where(mask, column, -1), -1)
        return result

    @cached_property
    def _compared(self) -> dict[str, tuple[Array, Array]]:
        """By what is compared: the values of all calls, and whether a call's value must be that of the others."""
        calls = self.calls
        torch, message = self._is("api", ("torch",)), self._is("op", ("send", "recv"))
        reliable = np.array([member.proves for member in self.members], bool)[calls["process"]]
        same_size = np.where(torch, self._is("op", _SAME_SIZE_TORCH), self._is("op", _SAME_SIZE))
        same_size &= (calls["flags"] & _OWN_SIZES) == 0
        same_dtype = np.where(torch, self._is("op", _SAME_DTYPE_TORCH), self._is("op", _SAME_DTYPE))
        same_dtype &= ~self._is("dtype", ("", "object", UNKNOWN))
        rooted = self._is("op", _ROOTED) & (calls["peer"] >= 0)
        # What differs between different operations says nothing.
        same_op = np.zeros(len(calls), bool)
        codes = calls["op"].astype(np.int64)
        equal = calls.smallest(np.where(reliable, codes, np.iinfo(np.int64).max)) == calls.largest(
            np.where(reliable, codes, -1), -1
        )
        instance = calls["instance"]
        same_op[calls.matched] = equal[instance[calls.matched]]
        known = reliable & (same_op | message)
        return {
            "operation": (codes, reliable & ~message),
            "size": (calls["payload"], known & same_size),
            "dtype": (calls["dtype"].astype(np.int64), known & same_dtype),
            "root": (calls["peer"].astype(np.int64), known & rooted),
        }

    def disagreement(self, stuck: _Stuck) -> str:
        """Return what the ranks of a call disagree about, "" if nothing."""
        at = np.array(sorted(stuck.calls.values()))
        ranks = np.array([self.members[number].rank for number in self.calls["process"][at]])
        texts = []
        for name, (column, mask) in self._compared.items():
            values = column[at][mask[at]]
            if len(values) and values.min() < values.max():
                of = {value: ranks[mask[at] & (column[at] == value)] for value in dict.fromkeys(values.tolist())}
                parts = [
                    f"{self._value(name, value)} on rank {shorten_ranks(format_ranks(group))}"
                    for value, group in islice(of.items(), MAX_SINGLE)
                ]
                more = f" and {len(of) - len(parts):,} more" if len(parts) < len(of) else ""
                texts.append(f"{name}: {', '.join(parts)}{more}")
        return "; ".join(texts)

    def _value(self, name: str, value: int) -> str:
        if name in ("operation", "dtype"):
            return str(self.calls.categories["op" if name == "operation" else name][value])
        return f"{format_count(value)} bytes" if name == "size" else f"rank {value}"

    # ---- who is in it, who is not ----------------------------------------------------------------------------------

    def examine(self, stuck: _Stuck) -> bool:
        """Fill in who waits and who is absent. Returns whether the call is stuck."""
        members, state = self.members, self.calls["state"]
        stuck.disagreement = self.disagreement(stuck)
        absent = [self.by_rank.get(rank, -1) for rank in stuck.channel.ranks]
        absent = [number for number in absent if number not in stuck.calls]
        if any(number < 0 or not self._never_came(number, stuck) for number in absent):
            if not stuck.disagreement:
                return False
            absent = []
        in_call = [n for n, call in stuck.calls.items() if state[call] != State.COMPLETE and self._stays(n, call)]
        if not in_call or not any(members[number].proves for number in in_call):
            # Complete, or left: nobody waits, but the ranks may have disagreed.
            stuck.waiting, stuck.absent = [], absent
            stuck.since_ns = max(map(self.began, stuck.calls.values()))
            return bool(stuck.disagreement) and self._identified(stuck)
        last_alive = max(members[number].alive_ns for number in in_call)
        failures = [number for number in in_call if state[stuck.calls[number]] == State.FAILED]
        killed = self._only_death if failures else None
        dead = [n for n in {*absent, *in_call} if members[n].died and members[n].alive_ns + OUTLIVED_NS < last_alive]
        if killed is not None and killed in {*absent, *in_call} - {*failures}:
            dead = [killed]
        stuck.absent = sorted({*absent, *dead})
        stuck.waiting = sorted({*in_call} - {*dead})
        if not stuck.waiting:
            return False
        stuck.since_ns = min(self.began(stuck.calls[number]) for number in stuck.waiting)
        waits = [self._waited(number, stuck) for number in stuck.waiting]
        stuck.waited_ns = max(waits) if stuck.absent else min(waits)
        long = stuck.waited_ns >= self._limit(stuck)
        if long and not stuck.disagreement:  # before that, the message with the other tag may be the next but one
            stuck.disagreement = self._tags(stuck, absent) or self._communicators(stuck)
        return long or killed in dead or (bool(stuck.disagreement) and self._identified(stuck))

    @cached_property
    def _only_death(self) -> int | None:
        """The process that did not close its log, if all others closed theirs; a launcher ends all or none of them."""
        died = [number for number, member in enumerate(self.members) if member.died]
        closed = sum(member.closed for member in self.members)
        return died[0] if len(died) == 1 and closed == len(self.members) - 1 else None

    def _tags(self, stuck: _Stuck, absent: list[int]) -> str:
        """Return which tag a sender used that a receive does not take, "" if it sent nothing else."""
        call = next(iter(stuck.calls.values()))
        if not absent or self.text("op", call) != "recv" or int(self.calls["tag"][call]) < 0:
            return ""
        sent = self._unreceived(self.of[absent[0]], call)
        tags = {int(self.calls["tag"][other]) for other in sent.tolist()} - {int(self.calls["tag"][call])}
        ranks = [self.members[number].rank for number in (next(iter(stuck.calls)), absent[0])]
        others = ", ".join(map(str, sorted(tags)))
        return f"tag: {self.calls['tag'][call]} on rank {ranks[0]}, {others} on rank {ranks[1]}" if tags else ""

    def _identified(self, stuck: _Stuck) -> bool:
        """Return whether the group of a call is the same on all ranks for certain.

        Communicators of MPI with the same ranks and without names are told apart by the order of their first use.
        """
        collective = stuck.channel.source < 0 and stuck.number != NOT_MATCHED
        unnamed = collective and not stuck.channel.group.name
        return not unnamed or self.text("api", next(iter(stuck.calls.values()))) != "mpi"

    def _communicators(self, stuck: _Stuck) -> str:
        """Return that ranks are perhaps in different communicators, "" if not."""
        if stuck.absent or self._identified(stuck) or len({*map(self.site, stuck.calls.values())}) == 1:
            return ""
        return "communicator: perhaps not the same, as they have no names and the call sites differ"

    def site(self, call: int) -> str:
        """Return the call site of a call."""
        return self.text("site", call)

    def _limit(self, stuck: _Stuck) -> int:
        """Return how long a wait has to be: longer than the pauses of the ranks concerned until it began."""
        concerned = {*stuck.calls, *stuck.absent}
        return max(MIN_WAIT_NS, FACTOR * max(self.members[n].longest_pause(stuck.since_ns) for n in concerned))

    def _stays(self, number: int, call: int) -> bool:
        """Return whether a process is still in a call, or ended in it; not if it left by itself or went on for long."""
        member, failed = self.members[number], self.calls["state"][call] == State.FAILED
        if not member.has_times or (member.closed and not failed):
            return False
        following = member.next_begin(self.began(call))
        return following is None or member.quiet_ns - following < MIN_WAIT_NS

    def _waited(self, number: int, stuck: _Stuck) -> int:
        """Return for how long a process was in a call at least, and did nothing else."""
        member, call = self.members[number], stuck.calls[number]
        if self.calls["state"][call] != State.FAILED:
            return member.alive_ns - member.quiet_ns
        # When it failed is not known: before the process's next call, and an absent rank was there all the time.
        there = max((self.members[other].alive_ns for other in stuck.absent), default=0)
        following = member.next_begin(self.began(call)) or member.alive_ns
        return min(member.alive_ns, there, following) - self.began(call)

    def _never_came(self, number: int, stuck: _Stuck) -> bool:
        """Return whether the log of a process proves that it did not make a call."""
        member, calls, at = self.members[number], self.calls, self.of[number]
        if not member.proves:
            return False
        instance = calls["instance"][at]
        if stuck.number == NOT_MATCHED:
            receive = next(iter(stuck.calls.values()))
            tag, sent = int(calls["tag"][receive]), calls["tag"][self._unreceived(at, receive)]
            return not (len(sent) if tag < 0 else (sent == tag).any())
        instance = instance[instance != NOT_MATCHED]
        seqs = calls.seq[instance[calls.channel[instance] == stuck.number]]
        if len(seqs):
            return stuck.seq is not None and int(seqs.max()) < stuck.seq
        if member.removed or not self.whole[number]:
            return False
        receives = stuck.channel.source >= 0 and stuck.channel.destination == member.rank
        return not (receives and self._receives_from_any(at, stuck.channel))

    def _receives_from_any(self, at: slice, channel: Channel) -> bool:
        """Return whether an open receive of a process that names no source or no tag may be the one of a channel."""
        calls = self.calls
        open_ = (calls["instance"][at] == NOT_MATCHED) & (calls["state"][at] != State.COMPLETE)
        open_ &= self._is("op", ("recv",))[at]
        open_ &= np.isin(calls["peer"][at], (-1, channel.source)) & np.isin(calls["tag"][at], (-1, channel.tag))
        return bool(open_.any())

    def _unreceived(self, at: slice, receive: int) -> Array:
        """Return the sends of a process to the rank and in the group of a receive that no receive is matched with."""
        calls, receiver = self.calls, self.members[int(self.calls["process"][receive])].rank
        sent = self._is("op", ("send",))[at] & (calls["peer"][at] == receiver)
        sent &= calls["group"][at] == calls["group"][receive]
        positions = at.start + np.flatnonzero(sent)
        instance = calls["instance"][positions]
        unreceived = [number == NOT_MATCHED or not calls.complete[number] for number in instance.tolist()]
        return np.asarray(positions[np.array(unreceived, bool)])

    # ---- the table -------------------------------------------------------------------------------------------------

    def stuck_calls(self) -> list[_Stuck]:
        """Return the calls that are stuck: first those that others wait for."""
        found = [stuck for stuck in self.candidates() if self.examine(stuck)]
        waits_in = {number: stuck for stuck in found for number in stuck.waiting}
        for stuck in found:
            if not stuck.disagreement and _waits_for_itself(stuck, waits_in):
                stuck.disagreement = self._order(stuck, waits_in)

        def follows(stuck: _Stuck) -> bool:
            return not stuck.disagreement and any(number in waits_in for number in stuck.absent)

        found.sort(key=lambda stuck: (follows(stuck), stuck.disagreement.startswith("order"), stuck.since_ns))
        return found

    def _order(self, stuck: _Stuck, waits_in: Mapping[int, _Stuck]) -> str:
        texts = []
        for number in (number for number in stuck.absent if number in waits_in):
            call = waits_in[number].calls[number]
            texts.append(f"rank {self.members[number].rank} is in {self.name(call)}")
        return f"order: {', '.join(texts)}, which waits in turn"

    def name(self, call: int) -> str:
        """Return the name of a call: operation, number, and group or addresses."""
        op = self.text("op", call)
        seq, peer, tag = (int(self.calls[name][call]) for name in ("seq", "peer", "tag"))
        if op in ("send", "recv"):
            other = f"rank {peer}" if peer >= 0 else "any rank"
            return f"{op} {seq} {'to' if op == 'send' else 'from'} {other}" + (f" with tag {tag}" if tag >= 0 else "")
        return f"{op} {seq} of group {self.text('group', call)}"

    def sites(self, calls: list[int]) -> str:
        """Return the call sites of calls, the most frequent first."""
        texts = [self.site(call) for call in calls]
        return "; ".join(sorted({*texts} - {""}, key=lambda text: (-texts.count(text), text)))


def _stem(path: Path) -> Path:
    """Return what the paths of the files of one process have in common."""
    return path.with_name(path.name.split(".")[0].removesuffix("-kept"))


def _waits_for_itself(stuck: _Stuck, waits_in: Mapping[int, _Stuck]) -> bool:
    """Return whether the absent ranks of a call wait for others, and these for others, back to this call."""
    seen: set[int] = set()
    reached = [*stuck.absent]
    while reached:
        number = reached.pop()
        if number in waits_in and number not in seen:
            seen.add(number)
            reached += waits_in[number].absent
    return any(number in seen for number in stuck.waiting)


def _is_damaged(process: Process) -> bool:
    """Return whether records of a process, which were read, are damaged."""
    kept = [] if process.kept is None else [process.kept]
    return any(segment.damaged for segment in (*process.segments, *kept))


def _last(process: Process, count: int) -> Process:
    segments = last_records(process.segments, count)
    if process.kept is None:
        return replace(process, segments=segments)
    kept = process.kept.last(count)
    without_gaps = _without_gaps(process, segments, kept)
    damaged = {name: 1 for segment in (kept, *segments) for name in segment.damaged}
    return replace(process, segments=(without_gaps,), kept=replace(kept, damaged=damaged))


def _without_gaps(process: Process, segments: Iterable[Segment], kept: Segment) -> Segment:
    """Return all calls of a process that began after the first one kept had ended, and those that block it.

    Before that, calls may be missing: of a channel, a later call than the last one known. A call without an observed
    end may be kept long after it returned: the first one kept is one with an observed end, if any.
    """
    last, others = (
        np.concatenate([np.zeros(0, RECORD), *(block for segment in source for block in segment.blocks())])
        for source in ((kept,), segments)
    )
    ended = np.flatnonzero(last["state"] == State.COMPLETE)
    first = last[ended[0] : ended[0] + 1] if len(ended) else last[:1]
    since = max(int(first[name].max(initial=0)) for name in ("t_return", "t_wait", "t_end"))
    if np.isin(first["clock"], DEVICE_CLOCKS).any():
        since += clock_error_ns(process)
    new = others[~np.isin(record_keys(others), record_keys(last))]
    records = np.concatenate([last, new])
    blocks = (records["state"] == State.BEGUN) | ((records["state"] == State.RETURNED) & (records["t_wait"] > 0))
    records = records[(records["t_begin"] >= since) | blocks]
    return MemorySegment(process.path, 0, len(records), records=records)


def find_stuck_calls(run: RecordedRun) -> NamedTables:
    """Return the tables `stuck_calls` and `stuck_ranks` of a run."""
    calls, ranks = [], []
    if not run.simulated and any(map(_is_suspicious, run.processes)):
        examination = _Examination(run)
        for number, stuck in enumerate(examination.stuck_calls()):
            calls.append(_call_row(examination, stuck))
            ranks += [*_rank_rows(examination, stuck, number)]
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


def _call_row(examination: _Examination, stuck: _Stuck) -> dict[str, object]:
    members = examination.members
    shown = [stuck.calls[number] for number in stuck.waiting if number in stuck.calls] or [*stuck.calls.values()]
    ops = [examination.text("op", call) for call in shown]
    return {
        "op": max(dict.fromkeys(ops), key=ops.count),
        "group_ranks": format_ranks(stuck.channel.ranks),
        "seq": stuck.seq,
        "waiting_ranks": format_ranks(members[number].rank for number in stuck.waiting),
        "absent_ranks": format_ranks(members[number].rank for number in stuck.absent),
        "disagreement": stuck.disagreement,
        "since_ns": stuck.since_ns,
        "waited_ns": max(0, stuck.waited_ns),
        "site": examination.sites(shown),
    }


def _rank_rows(examination: _Examination, stuck: _Stuck, number: int) -> Iterator[dict[str, object]]:
    """Yield where each rank of a stuck call is: in it, or at its last call."""
    calls = examination.calls
    for process in sorted({*stuck.calls, *stuck.absent}, key=lambda process: examination.members[process].rank):
        member, at = examination.members[process], examination.of[process]
        call = stuck.calls.get(process)
        if call is None and at.stop > at.start:
            call = at.start + int(np.argmax(calls["t_begin"][at]))
        where = "waiting" if process in stuck.waiting else "absent" if process in stuck.absent else "done"
        known = call is not None
        yield {
            "stuck_call": number,
            "rank": member.rank,
            "part": where,
            "call": examination.name(call) if call is not None else None,
            "state": State(int(calls["state"][call])).name.lower() if known else None,
            "begin_ns": examination.began(call) if call is not None else None,
            "site": examination.sites([call]) if call is not None else "",
            "end": member.end,
            "alive_ns": member.alive_ns,
        }


ANALYSIS: Final = without_records("stuck_calls", find_stuck_calls)
"""Reads the last records itself, and none of a run whose processes all closed their logs without a failed call."""
