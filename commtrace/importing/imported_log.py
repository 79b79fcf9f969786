"""Log of an imported run: written by the recorder's own writers, and marked with its source.

What the source does not state is missing in the log: a payload is marked by the `sizes` of its kind, a group has no
row, a time is 0, an end that was not observed has the state UNOBSERVABLE. What else is missing is in the process's list
of blind spots. Calls that the source only counts are in a summary, as with COMMTRACE_MODE=summary (`imported_summary`).
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import commtrace
from commtrace.operations import MESSAGES, OPERATIONS
from commtrace.rank_ranges import format_rank_list
from commtrace.reading.device_work import Work, make_work, write_work
from commtrace.recording.segment_writer import SegmentSeries
from commtrace.recording.table_lines import TableLines
from commtrace.schema import FORMAT, RECORD, VERSION

from .enclosing import union
from .events import (
    DeviceWork,
    Event,
    ImportedCall,
    ImportedGroup,
    ImportedProcess,
    ImportedSite,
    ImportedTotal,
    NotKnown,
    NotRecorded,
    Problem,
    StepSpans,
)
from .events_of_files import EventReader, events_of_files
from .formats import Format
from .imported_summary import ImportedSummary

_BLOCK: Final = 4096
_SEGMENT_BYTES: Final = (1 << 20, 64 << 20)
_MIDDLE_NS: Final = 1 << 56
"""Where times of the first process begin in the log, so that other processes may have begun years before or after."""

_OPERATION_NUMBERS: Final = {op: number for number, op in enumerate(OPERATIONS)}
_NUMBERING: Final = 31
"""Numbers between two calls of one operation where a source numbers each operation of a group by itself.

It is odd, so that analyses that sample numbers by powers of two have calls of all operations."""
assert len(_OPERATION_NUMBERS) < _NUMBERING

_Channel = tuple[Any, ...]


@dataclass
class ImportedRun:
    """What was imported.

    Attributes:
        calls: Number of calls.
        ranks: The ranks.
        problems: What is wrong with the files, as texts.
    """

    calls: int = 0
    ranks: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


class _ChannelNumbers:
    """Numbers of the calls of one channel (a group's collectives, or messages with equal addresses) of a process."""

    def __init__(self) -> None:
        self.last = -1
        self.is_stated = True
        """Whether the source states all numbers, ascending: calls of a coalesced group may share one."""
        self.before_step: dict[int, int] = {}
        """Number of calls before the first one of each step."""

    def next(self, stated: int | None, step: int) -> int:
        """Return the number of the next call, which is of a step."""
        self.is_stated &= stated is not None and stated > self.last
        if step >= 0:
            self.before_step.setdefault(step, self.last + 1)
        self.last = stated if self.is_stated and stated is not None else self.last + 1
        return self.last


class _ProcessLog:
    """The log of one process while it is written."""

    def __init__(self, folder: Path, run: str, process: ImportedProcess, rank: int, number: int, origin: int) -> None:
        self.rank, self.origin = rank, origin
        self.host = process.host or f"unknown-host-of-rank-{rank}"
        self.folder = folder / run / re.sub(r"[^A-Za-z0-9._-]", "_", self.host).lstrip(".")[:200]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.stem = f"rank{rank:05d}-{process.pid or number}"
        self.files: list[str] = []
        self.calls = 0
        self.not_recorded = self.impossible = 0
        self.not_known: dict[str, None] = {}
        self.problems: list[tuple[str, Problem]] = []
        self.numbers: dict[_Channel, _ChannelNumbers] = defaultdict(_ChannelNumbers)
        smallest, largest = _SEGMENT_BYTES
        self._series = SegmentSeries(self.folder, self.stem, smallest=smallest, largest=largest, max_bytes=1 << 50)
        self._tables = TableLines()
        self._groups: Counter[tuple[str, str]] = Counter()
        self._block, self._filled = np.zeros(_BLOCK, RECORD), 0
        self._work: list[npt.NDArray[Any]] = []
        self._summary = ImportedSummary()
        self._threads: dict[int, int] = {}
        self._process = process
        self._run = run

    def add(self, event: Event) -> None:
        """Add an event of the process."""
        match event:
            case ImportedCall():
                self._add_call(event)
            case ImportedTotal():
                call = event.call
                group = 0 if call.group is None else self._group(call.group)
                self._summary.add(event, self._kind(call.kind, _sizes(call)), group, self._site(call.site))
                self.calls += event.calls
            case NotRecorded():
                self.not_recorded += event.calls
            case DeviceWork():
                self._work += (make_work(event.computation, Work.COMPUTATION), make_work(event.copies, Work.COPY))
            case StepSpans():
                self._work.append(make_work(event.spans, Work.STEP, event.steps))
            case NotKnown():
                self.not_known[event.text] = None
            case Problem():
                self.problems.append((self.files[-1], event))

    def _add_call(self, call: ImportedCall) -> None:
        op = call.kind[0]
        group = 0 if call.group is None else self._group(call.group)
        channel: _Channel = (group, op) if call.seq_of_operation else (group,)
        if op in MESSAGES:
            ends = (self.rank, call.peer) if op == "send" else (call.peer, self.rank)
            channel = (group, *ends, call.tag)
        seq = self.numbers[channel].next(call.seq, call.step)
        if call.seq_of_operation:
            seq = seq * _NUMBERING + _OPERATION_NUMBERS.get(op, _NUMBERING - 1)
        times = (self._time(t) for t in (call.t_begin, call.t_return, call.t_wait, call.t_start, call.t_end))
        if self._filled == _BLOCK:
            self._flush()
        row = (
            *times, call.payload or 0, min(call.local or 0, call.payload or 0), seq & 0xFFFFFFFF, group,
            self._site(call.site), call.step, -1, call.peer, call.tag, call.batch & 0xFFFFFFFF,
            self._kind(call.kind, _sizes(call)), self._threads.setdefault(call.thread, len(self._threads) + 1) & 0xFFFF,
            call.phase, call.clock, call.flags, call.state,
        )  # fmt: skip
        try:
            self._block[self._filled] = row
        except OverflowError:
            self.impossible += 1
            return
        self._filled += 1
        self.calls += 1

    def _time(self, time: int) -> int:
        return max(1, time - self.origin) if time else 0

    def _flush(self) -> None:
        self._series.append(self._block[: self._filled])
        self._filled = 0

    def _kind(self, kind: tuple[str, str, str, str, str], sizes: str) -> int:
        op, variant, api, dtype, reduce_op = kind
        row: dict[str, Any] = {"op": op, "variant": variant, "api": api, "dtype": dtype, "reduce_op": reduce_op or None}
        return self._tables.row_id("kinds", (kind, sizes), lambda: {**row, **({"sizes": sizes} if sizes else {})})

    def _group(self, group: ImportedGroup) -> int:
        def row() -> dict[str, Any]:
            key = format_rank_list(sorted(group.ranks)), group.name
            index = self._groups[key]
            self._groups[key] += 1
            return {
                "ranks": format_rank_list(group.ranks), "name": group.name, "desc": group.description,
                "backend": group.backend, "index": index,
            }  # fmt: skip

        return self._tables.row_id("groups", group, row)

    def _site(self, site: ImportedSite | None) -> int:
        if site is None:
            return 0
        row: dict[str, Any] = {"file": site.file, "line": site.line, "function": site.function}
        if site.purpose is not None:
            row["purpose"] = {"name": site.purpose.value, **({"module": site.module} if site.module else {})}
        return self._tables.row_id("sites", site, lambda: row)

    def close(self, source: str) -> None:
        """Write what is left, and the tables. Raises OSError."""
        self._flush()
        self._series.close()
        if self._work:
            write_work(self.folder / f"{self.stem}-device.npy", self._merged_work())
        if self.impossible:
            text = f"{self.impossible:,} calls have numbers that are impossible"
            self.problems.append((self.files[-1], Problem(text, "they are left out")))
        facts = self._process
        clock = {"mono_ns": _MIDDLE_NS, "unix_ns": self.origin + _MIDDLE_NS} if facts.clock_is_wall else {}
        problems = [[file, problem.kind, problem.text, problem.consequence] for file, problem in self.problems]
        process = {
            "table": "process", "format": FORMAT, "version": VERSION, "run": self._run, "rank": self.rank,
            "world_size": facts.world_size, "host": self.host, "pid": facts.pid, **facts.facts, **clock,
            "source": {
                "format": source, "tool": facts.tool, "files": self.files, "host_known": bool(facts.host),
                "times_known": facts.has_times, "imported_by": commtrace.__version__,
                "problems": problems, **({"alive_ns": facts.alive_ns - self.origin} if facts.alive_ns else {}),
            },
            "simulated": False, "blind_spots": [*self.not_known],
        }  # fmt: skip
        if self._summary.calls:
            self._summary.write(self.folder, self.stem)
        stats = {
            "table": "stats", "calls": self.calls + self.not_recorded, "dropped": self.not_recorded, "removed": 0,
            "lost": 0, "unrecorded": 0, **({"summarized": self._summary.calls} if self._summary.calls else {}),
        }  # fmt: skip
        lines = [json.dumps({name: value for name, value in process.items() if value is not None}).encode() + b"\n"]
        lines += self._tables.lines
        end = [] if facts.alive_ns else [{"table": "end", "reason": "exit"}]
        lines += [json.dumps(row).encode() + b"\n" for row in (stats, *end)]
        (self.folder / f"{self.stem}.jsonl").write_bytes(b"".join(lines))

    def _merged_work(self) -> npt.NDArray[Any]:
        rows = np.concatenate(self._work)
        rows["begin"] -= self.origin
        rows["end"] -= self.origin
        parts = [rows[rows["kind"] == Work.STEP]]
        for kind in (Work.COMPUTATION, Work.COPY):
            chosen = rows[rows["kind"] == kind]
            parts.append(make_work(union(chosen["begin"], chosen["end"]), kind))
        return np.concatenate(parts)

    def channels(self) -> Iterator[tuple[_Channel, int, _ChannelNumbers]]:
        """Yield each channel as all processes name it, the number of its group in this process, and its numbers."""
        groups = {number: group for (table, group), number in self._tables.numbers.items() if table == "groups"}
        for channel, numbers in self.numbers.items():
            group = groups.get(channel[0])
            if isinstance(group, ImportedGroup) and not numbers.is_stated:
                yield (tuple(sorted(group.ranks)), group.name, *channel[1:]), channel[0], numbers

    def shift_numbers(self, shifts: dict[int, int]) -> None:
        """Add to the numbers of the collectives of groups, given by number."""
        for path in sorted(self.folder.glob(f"{self.stem}.*.npy")):
            records = np.load(path, mmap_mode="r+")
            for group, shift in shifts.items():
                records["seq"][records["group"] == group] += np.uint32(shift)
            records.flush()


def _sizes(call: ImportedCall) -> str:
    """Return which size of a call is not known, as the kinds table has it."""
    return "payload" if call.payload is None else "own share" if call.local is None else ""


def _readers(files: Sequence[tuple[Path, Format]]) -> dict[str, EventReader]:
    """Return what yields the events of a file, by the name of its format; without formats that complete another."""
    paths: dict[str, list[Path]] = defaultdict(list)
    for path, known in files:
        paths[known.name].append(path)
    formats = {known.name: known for _, known in files}
    completing: dict[str, list[Path]] = defaultdict(list)
    for name, known in formats.items():
        completing[known.completes] += paths[name]
    return {
        name: known.events if known.survey is None else known.survey(paths[name], completing[name])
        for name, known in formats.items()
        if known.completes not in formats
    }


def write_imported_log(files: Sequence[tuple[Path, Format]], folder: Path, run: str) -> ImportedRun:
    """Write the log of files that other tools wrote.

    Args:
        files: The files with their formats. Those of one rank, host and process are parts of one process.
        folder: Directory to write to.
        run: Name of the run.

    Returns:
        What was imported.

    Raises:
        ImportFileError: A file cannot be imported.
        OSError: The log cannot be written.
    """
    result = ImportedRun()
    logs: dict[tuple[Any, ...], _ProcessLog] = {}
    origin, readers = None, _readers(files)
    read = [(path, readers[known.name]) for path, known in files if known.name in readers]
    for path, events in events_of_files(read, folder):
        log: _ProcessLog | None = None
        for event in events:
            if isinstance(event, ImportedProcess):
                rank = event.rank if event.rank is not None else _free_rank(logs.values())
                key = rank, event.host, event.pid
                if key not in logs:
                    log_origin = _origin(event) if origin is None or not event.clock_is_wall else origin
                    if event.clock_is_wall:
                        origin = log_origin
                    logs[key] = _ProcessLog(folder, run, event, rank, len(logs) + 1, log_origin)
                log = logs[key]
                if str(path) not in log.files[-1:]:
                    log.files.append(str(path))
                if event.rank is None:
                    log.not_known[f"its rank: it was numbered {rank}, in the order of the files"] = None
            elif log is not None:
                log.add(event)
    for log in logs.values():
        log.close(next(iter(readers)))
        result.calls += log.calls
        result.ranks.add(log.rank)
        result.problems += [f"{file}: {problem.text}; {problem.consequence}" for file, problem in log.problems]
    _align_numbers([*logs.values()])
    return result


def _origin(process: ImportedProcess) -> int:
    return process.moment_ns - _MIDDLE_NS


def _free_rank(logs: Iterable[_ProcessLog]) -> int:
    used = {log.rank for log in logs}
    return next(rank for rank in range(len(used) + 1) if rank not in used)


def _align_numbers(logs: Sequence[_ProcessLog]) -> None:
    """Give the same numbers to calls of different ranks that belong together, where their files begin at other steps.

    In the first step that all processes with a channel have, the first calls belong together.
    """
    channels: dict[_Channel, list[tuple[_ProcessLog, int, _ChannelNumbers]]] = defaultdict(list)
    for log in logs:
        for channel, group, numbers in log.channels():
            if len(channel) == 2:
                channels[channel].append((log, group, numbers))
    shifts: dict[int, dict[int, int]] = defaultdict(dict)
    for members in channels.values():
        common = set.intersection(*({*numbers.before_step} for _, _, numbers in members))
        if len(members) < 2 or not common:
            continue
        step = min(common)
        most = max(numbers.before_step[step] for _, _, numbers in members)
        for log, group, numbers in members:
            if shift := most - numbers.before_step[step]:
                shifts[logs.index(log)][group] = shift
    for number, by_group in shifts.items():
        logs[number].shift_numbers(by_group)
