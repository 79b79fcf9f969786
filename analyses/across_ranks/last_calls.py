"""The last calls of all processes of a run, matched, and how each process ended.

For a process whose log lacks steps, the kept calls are read, too (`Process.kept`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from commtrace.analyses.coverage import FILE_PROBLEMS
from commtrace.operations import MESSAGES
from commtrace.reading.labels import group_label
from commtrace.reading.process_reader import Process
from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.segment_reader import BLOCK, MemorySegment, Segment, last_records
from commtrace.reading.table_reader import integer_or_none
from commtrace.recording.recovery import are_among
from commtrace.schema import DEVICE_CLOCKS, RECORD, WITHOUT_RECORD, State

from .clock_alignment import align_clocks
from .clocks import wall_clock_offsets
from .dependencies import clock_error_ns
from .matching import MatchedCalls, match_calls

MAX_RECORDS: Final = 1 << 20
"""Number of records that are read of all processes; of each process, at least MIN_RECORDS are."""
MIN_RECORDS: Final = 256

_COLUMNS: Final = (
    "t_begin", "t_return", "t_wait", "t_end", "payload", "peer", "tag", "state", "flags", "seq",
    "op", "dtype", "api", "group", "site",
)  # fmt: skip
_NO_TIME: Final = np.iinfo(np.int64).min


class Member:
    """A process, according to its log. Times are wall-clock ns.

    Attributes:
        at: Positions of its calls in the matched calls.
        has_all_records: Whether these are all calls in its log.
        end: How it ended: "exit" (it closed its log), "runs", "died", or "unknown".
        proves: Whether its log lacks nothing: a call that is not in the log was not made.
        last_call: Position of the call that began last, None without any.
        begins: When its calls began, ascending.
        quiet_ns: Its last event: the start, return or end of any of its calls.
        alive_ns: The last time at which it is known to have been alive, and not stopped.
        resumed_ns: When it last went on after it may have been stopped; long ago if it never was.
    """

    def __init__(
        self, process: Process, offset: int | None, calls: MatchedCalls, at: slice, *, damaged: bool, has_all: bool
    ) -> None:
        tables, stats = process.tables, process.tables.stats or {}
        counters = {name: integer_or_none(stats.get(name)) or 0 for name in (*WITHOUT_RECORD, "hook_errors")}
        end = tables.end or {}
        self.rank, self.at, self.has_all_records = process.rank, at, has_all
        self.offset, self.has_times = offset or 0, offset is not None
        self.removed = counters.pop("removed") > 0
        self.end = "exit" if tables.end is not None else "unknown" if not tables.salvage else "died"
        if tables.end is None and process.live_at_ns > 0:
            self.end = "runs"
        is_over = self.end in ("runs", "died") or end.get("reason") == "exit"
        lacks_steps = process.kept is None and (process.not_selected > 0 or process.summary is not None)
        self.proves = is_over and not damaged and not lacks_steps and not any(counters.values()) and self.has_times
        times = [calls[name][at].astype(np.int64) for name in ("t_begin", "t_return", "t_wait", "t_end")]
        self.last_call = at.start + int(np.argmax(times[0])) if len(times[0]) else None
        known = [column[column > 0] + self.offset for column in times]
        self.begins = np.sort(known[0])
        self.quiet_ns = max(int(column.max(initial=_NO_TIME)) for column in known)
        moments = [stats.get("mono_ns"), end.get("mono_ns"), *(row.get("mono_ns") for row in tables.clock)]
        # A process that is stopped does not wait.
        seen_ns = max(process.ran_until_ns, *(integer_or_none(moment) or 0 for moment in moments))
        self.alive_ns = max(seen_ns + self.offset, self.quiet_ns)
        self.resumed_ns = process.live_late_turn_ns + self.offset if process.live_late_turn_ns else _NO_TIME

    def shift(self, ns: int) -> None:
        """Correct all times by the error of the process's wall clock."""
        self.offset += ns
        self.begins = self.begins + ns
        self.quiet_ns += ns
        self.alive_ns += ns
        self.resumed_ns = max(self.resumed_ns + ns, _NO_TIME)

    def longest_pause(self, before: int) -> int:
        """Return the longest time between two calls that began up to a moment, in which it was not stopped."""
        begins = self.begins[: np.searchsorted(self.begins, before, "right")]
        pauses = np.diff(begins)
        return int(pauses[(begins[:-1] >= self.resumed_ns) | (begins[1:] <= self.resumed_ns)].max(initial=0))

    def next_begin(self, after: int) -> int | None:
        """Return when its first call after a moment began; None if there is none."""
        at = int(np.searchsorted(self.begins, after, "right"))
        return int(self.begins[at]) if at < len(self.begins) else None


class LastCalls:
    """The last calls of a run, matched, and its processes. A call is given by its index in `calls`."""

    def __init__(self, run: RecordedRun, most_records: int = MAX_RECORDS) -> None:
        count = max(MIN_RECORDS, min(BLOCK, most_records // max(1, len(run.processes))))
        tail = RecordedRun(replace(run.log, processes=tuple(_last(process, count) for process in run.processes)))
        self.calls: MatchedCalls = match_calls(tail, _COLUMNS)
        self.groups = {group_label(group): group for group in tail.labels.groups.values()}
        unsafe = {_stem(note.path) for note in run.log.notes if note.kind in FILE_PROBLEMS}
        bounds = np.searchsorted(self.calls["process"], np.arange(len(run.processes) + 1)).tolist()
        self._tail, offsets = tail, wall_clock_offsets(tail)
        self.members = [
            Member(
                last,
                offset,
                self.calls,
                slice(*at),
                damaged=_is_damaged(last) or _stem(last.path) in unsafe,
                has_all=process.kept is None and not process.left_in_memory and _records(process) == _records(last),
            )
            for process, last, offset, at in zip(
                run.processes,
                tail.processes,
                map(offsets.get, range(len(run.processes))),
                pairwise(bounds),
                strict=True,
            )
        ]
        self.member_of_rank: dict[int, Member] = {}
        for member in self.members:
            # If a rank has two processes, neither proves anything.
            if (other := self.member_of_rank.setdefault(member.rank, member)) is not member:
                member.proves = other.proves = False

    def align(self) -> bool:
        """Correct the wall clocks of hosts that calls contradict: they may be wrong, or were set while the job ran.

        Returns:
            Whether any time has changed.
        """
        clocks = align_clocks(self._tail)
        reference = next(
            (own for own, host in zip(self.members, clocks.host_of_process.tolist(), strict=True)
             if host == clocks.reference and own.has_times), None,
        )  # fmt: skip
        has_changed = False
        for member, host in zip(self.members, clocks.host_of_process.tolist(), strict=True):
            clock = clocks.aligned[host]
            if reference is None or clock is None or host == clocks.reference or not member.has_times:
                continue
            bounds = clock.to_reference(np.array([member.alive_ns - member.offset]))
            earliest, latest = (int(bound[0]) + reference.offset for bound in bounds)
            error = min(max(member.alive_ns, earliest), latest) - member.alive_ns
            member.shift(error)
            has_changed |= error != 0
        return has_changed

    def text(self, column: str, call: int) -> str:
        """Return the label of a call."""
        return str(self.calls.text(column, np.array(call)))

    def member(self, call: int) -> Member:
        """Return the process that made a call."""
        return self.members[int(self.calls["process"][call])]

    def began(self, call: int) -> int:
        """Return when a call began, in wall-clock ns."""
        return int(self.calls["t_begin"][call]) + self.member(call).offset

    def name(self, call: int) -> str:
        """Return the name of a call: operation, number, and group or addresses."""
        op = self.text("op", call)
        seq, peer, tag = (int(self.calls[name][call]) for name in ("seq", "peer", "tag"))
        if op in MESSAGES:
            other = f"rank {peer}" if peer >= 0 else "any rank"
            return f"{op} {seq} {'to' if op == 'send' else 'from'} {other}" + (f" with tag {tag}" if tag >= 0 else "")
        return f"{op} {seq} of group {self.text('group', call)}"

    def sites(self, calls: Iterable[int]) -> str:
        """Return the call sites of calls, the most frequent first."""
        texts = [self.text("site", call) for call in calls]
        return "; ".join(sorted({*texts} - {""}, key=lambda text: (-texts.count(text), text)))


def _records(process: Process) -> int:
    return sum(segment.count for segment in process.segments)


def _stem(path: Path) -> Path:
    """Return what the paths of the files of one process have in common."""
    return path.with_name(path.name.split(".")[0].removesuffix("-kept"))


def _is_damaged(process: Process) -> bool:
    """Return whether any records that were read of a process are damaged."""
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
    """Return the calls of a process after the end of its first kept call, and those that block it.

    Before that, calls may be missing, even later ones of a channel than the last one known. A call
    without an observed end may be kept long after it returned, so the first kept call with an
    observed end counts, if there is one.
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
    new = others[~are_among(others, last)]
    records = np.concatenate([last, new])
    blocks = (records["state"] == State.BEGUN) | ((records["state"] == State.RETURNED) & (records["t_wait"] > 0))
    records = records[(records["t_begin"] >= since) | blocks]
    return MemorySegment(process.path, 0, len(records), records=records)
