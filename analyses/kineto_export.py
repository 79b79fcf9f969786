"""Traces as torch.profiler writes them, one file per process: `commtrace export --format kineto`.

    ProfilerStep#3                             a step: from the end of the one before to its last call's
      backward                                 calls of one phase, on a thread
        c10d::allreduce_                       a call, from its begin to its return (of torch only)
          record_param_comms                   the same, with sizes and group
        commtrace wait                         the program waits for a call
    ncclKernel_AllReduce (gloo, cpu call)      the operation in flight, until its observed end, on a stream per group

Tools tell communication by names of NCCL's kernels on streams, so that operations in flight have such names, whatever
carries them out. Those that no device measured are marked with the argument "commtrace": "cpu call". Nothing else of
a device is written, unless the run was imported from a trace that has it. `importing.kineto` reads what this module
writes, and shares its tables: names, element types, sizes, arguments.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.call_spans import (
    AlignedTimes,
    changes,
    common_clocks,
    ends_of_runs,
    lanes,
    no_calls,
    require_times,
)
from commtrace.analyses.grouping import Array
from commtrace.errors import OutputError
from commtrace.importing.kineto_sizes import CUT, TAG, lengths_of
from commtrace.importing.kineto_trace import CLOCK, COMMS, EXTERNAL_ID, FLAGS, MARK, ON_HOST, STEP, WAIT
from commtrace.importing.operation_names import BYTE, COLLECTIVE_NAMES, SCALAR_TYPES, UNKNOWN_OPERATION, operation_of
from commtrace.operations import MESSAGES, OPERATIONS
from commtrace.output_files import atomic_directory, atomic_write
from commtrace.rank_ranges import format_ranks
from commtrace.reading.device_work import Work, read_work, spans_of
from commtrace.reading.labels import group_label
from commtrace.reading.process_reader import Process
from commtrace.reading.record_columns import RecordColumns
from commtrace.reading.table_reader import Kind, RecordedGroup
from commtrace.schema import Clock, Flag, Phase, State, flags_label

_FIELDS: Final = (
    "t_begin", "t_return", "t_wait", "t_start", "t_end", "payload", "local", "seq", "step", "peer", "tag", "thread",
    "phase", "clock", "flags", "state",
)  # fmt: skip
_EXTENSIONS: Final = (".json", ".json.gz")
_MARKER: Final = "rank*.json.gz"
_DEVICE: Final = 0
"""Process id of streams, as Kineto writes the number of the device."""
_LISTED_RANKS: Final = 30
"""Ranks of a group that torch.profiler lists; `pg_config` has all."""
_SECOND: Final = 1_000_000_000
_PHASES: Final = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
_NO_KIND: Final = Kind(UNKNOWN_OPERATION, "", "", "", "", "payload")
_COMPRESSION: Final = 3
_FIRST_CORRELATION: Final = 1 << 31
"""Not small: HTA 0.5 stores indices of events in integers of the width of correlations, and fails with pandas 3."""
_DEVICE_WORK: Final = ((Work.COMPUTATION, "kernel", "computation"), (Work.COPY, "gpu_memcpy", "Memcpy"))


def export_kineto(
    run: AnalysedRun,
    out: Path,
    *,
    force: bool = False,
    ranks: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
) -> int:
    """Write a trace of each process of a run, atomically, with memory for the calls of one process.

    Args:
        run: The run.
        out: The folder to write `rank0.json.gz` and so on to; or, if it ends in .json or .json.gz, the file of the only
            process.
        force: Whether to replace an existing file, or a folder of traces.
        ranks: Ranks to write; None: all.
        steps: Steps to write, -1 for those before the first one; None: all.

    Returns:
        The number of calls written.

    Raises:
        LogError: The run is a dry run or a summary, or has no call of these ranks and steps.
        OutputError: The folder or file exists, cannot be written, or is a file for several processes.
    """
    require_times(run)
    if out.name.endswith(_EXTENSIONS):
        chosen = [process.rank for process in run.processes if ranks is None or process.rank in ranks]
        if len(chosen) > 1:
            raise OutputError(
                f"{out}: one file cannot hold {len(chosen)} processes (ranks {format_ranks(chosen)}); name a folder, "
                "or choose one with --ranks"
            )
        with atomic_write(out, force=force) as part:
            return _write_files(run, ranks, steps, lambda _: part, compress=out.suffix == ".gz")
    with atomic_directory(out, force=force, marker=_MARKER) as folder:
        return _write_files(run, ranks, steps, lambda process: folder / _file_name(run, process))


def _write_files(
    run: AnalysedRun,
    ranks: Sequence[int] | None,
    steps: Sequence[int] | None,
    path_of: Callable[[Process], Path],
    *,
    compress: bool = True,
) -> int:
    """Write the files of the processes. Return the number of calls. Raises LogError."""
    written, origin_ns, clocks = 0, None, common_clocks(run, ranks)
    for process, calls in _processes(run, ranks, steps):
        times = AlignedTimes(run, calls, clocks)
        at = np.flatnonzero(times.known & ((calls["flags"] & int(Flag.CAPTURED)) == 0))
        if not len(at):
            continue
        if origin_ns is None:  # 0 in the files: a second before the first call, on the common clock
            origin_ns = times.first_ns - times.first_unix_ns % _SECOND - _SECOND
            base_ns = max(0, times.first_unix_ns - (times.first_ns - origin_ns))
        at = at[np.argsort(times.begin[at], kind="stable")]
        text = (gzip.open(path_of(process), "xt", _COMPRESSION, encoding="utf-8") if compress
                else open(path_of(process), "x", encoding="utf-8"))  # fmt: skip
        with text as file:
            _TraceFile(file, run, process, calls, times, times.first_ns - origin_ns).write(at, base_ns)
        written += len(at)
    if not written:
        raise no_calls(run)
    return written


def _processes(
    run: AnalysedRun, ranks: Sequence[int] | None, steps: Sequence[int] | None
) -> Iterator[tuple[Process, RecordColumns]]:
    """Yield the processes with calls, and their calls."""
    for number, pieces in groupby(run.records(ranks, steps), key=lambda piece: piece[1].number):
        process = run.processes[number]
        # Memory that is never written to is not used.
        calls = RecordColumns.of(_FIELDS, sum(segment.count for segment in process.segments))
        for records, ids in pieces:
            calls.fill(records, ids)
        if len(calls):
            yield process, calls


def _file_name(run: AnalysedRun, process: Process) -> str:
    """Return the name of a process's file: of its rank, and of the process if the rank has several."""
    several = sum(other.rank == process.rank for other in run.processes) > 1
    return f"rank{process.rank}{f'-{process.pid}' if several else ''}.json.gz"


class _TraceFile:
    """The trace of one process while it is written."""

    def __init__(
        self, file: IO[str], run: AnalysedRun, process: Process, calls: RecordColumns, times: AlignedTimes, offset: int
    ) -> None:
        self._file, self._run, self._process, self._calls, self._offset = file, run, process, calls, offset
        self._begin, self._returned, self._started, self._end, self._wait = (
            np.where(moments >= 0, moments + offset, -1)
            for moments in (times.begin, times.returned, times.started, times.end, times.wait)
        )
        self._to_file = self._begin - calls["t_begin"]
        tables = process.tables
        self._groups = {
            group: (tables.backends.get(number, ""), tables.descriptions.get(number, ""))
            for number, group in tables.groups.items()
        }
        self._comms = lru_cache(4096)(self._comms_arguments)
        self._pid = max(process.pid, 1)
        self._separator = ""

    def write(self, at: Array, base_ns: int) -> None:
        """Write the file.

        Args:
            at: The calls to write, in the order of their begins.
            base_ns: Time 0 of the file in ns since 1970.
        """
        self._write_members(base_ns)
        self._name(self._pid, "process_name", f"rank {self._process.rank}, {self._process.host}")
        self._name(_DEVICE, "process_name", f"rank {self._process.rank}: operations in flight")
        self._write_steps(at)
        self._write_phases(at)
        streams, tracks = self._streams(at), self._tracks(at)
        for call in at.tolist():
            self._write_call(call, int(tracks[call]), int(streams[call]))
        self._write_device_work(int(streams.max(initial=0)))
        self._file.write("\n]}\n")

    def _write_members(self, base_ns: int) -> None:
        backends = {backend for backend, _ in self._groups.values() if backend}
        groups = [
            {
                "pg_name": _group_name(group), "pg_desc": description, "backend_config": backend,
                "pg_size": len(group.ranks), "ranks": [*group.ranks],
            }
            for group, (backend, description) in self._groups.items()
        ]  # fmt: skip
        info = {
            "backend": ",".join(sorted(backends)), "rank": self._process.rank, "world_size": self._run.world_size,
            "pg_count": len(groups), "pg_config": groups,
        }  # fmt: skip
        members = {
            "schemaVersion": 1, "distributedInfo": info, "host_name": self._process.host, "deviceProperties": [],
            "baseTimeNanoseconds": base_ns, "displayTimeUnit": "ms", "traceName": f"commtrace {self._run.id}",
        }  # fmt: skip
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in members.items())
        self._file.write(f'{{\n{lines},\n"traceEvents": [')

    def _write_steps(self, at: Array) -> None:
        """Write the steps: each begins at the end of the one before, and ends when its last call no longer blocks."""
        step, thread = self._calls["step"][at], self._calls["thread"][at]
        numbers, first, number = np.unique(step, return_index=True, return_inverse=True)
        blocked = np.where(self._wait[at] >= 0, np.maximum(self._wait[at], self._end[at]), -1)
        ends = np.zeros(len(numbers), np.int64)
        np.maximum.at(ends, number, np.maximum(self._returned[at], blocked))
        begins = self._begin[at][first]
        follows = np.flatnonzero((np.diff(numbers) == 1) & (numbers[:-1] >= 0)) + 1
        begins[follows] = np.minimum(begins[follows], ends[follows - 1])
        ends[:-1] = np.maximum(np.minimum(ends[:-1], begins[1:]), begins[:-1])
        for i in np.flatnonzero(numbers >= 0).tolist():
            self._event("user_annotation", f"{STEP}{numbers[i]}", int(thread[first[i]]), begins[i], ends[i])

    def _write_phases(self, at: Array) -> None:
        """Write the phases that `importing.kineto` knows by their names: the calls of each on a thread."""
        threads = self._calls["thread"][at]
        for thread in np.unique(threads).tolist():
            own = at[threads == thread]
            phase, begin = self._calls["phase"][own], self._begin[own]
            is_first = changes(phase) | changes(self._calls["step"][own])
            ends = ends_of_runs(is_first, self._returned[own])
            for i in np.flatnonzero(is_first & np.isin(phase, _PHASES)).tolist():
                self._event("user_annotation", Phase(phase[i]).name.lower(), thread, begin[i], ends[i])

    def _streams(self, at: Array) -> Array:
        """Write the names of the streams, and return that of each call, 0: its end is not known; shape (calls,)."""
        streams, number = np.zeros(len(self._calls), np.int64), 0
        at = at[self._end[at] >= self._started[at]]
        at = at[np.argsort(self._started[at], kind="stable")]
        groups = self._calls["group"][at]
        for group in np.unique(groups).tolist():
            own = at[groups == group]
            for lane in lanes(own, self._started[own], self._end[own]):
                number += 1
                streams[lane] = number
                recorded = self._run.labels.groups.get(group)
                name = "unknown group" if recorded is None else f"group {group_label(recorded)}"
                self._name(_DEVICE, "thread_name", name, number)
        return streams

    def _tracks(self, at: Array) -> Array:
        """Return the thread of each call; another number if two calls of a thread overlap, as those of MPI_Sendrecv."""
        threads = self._calls["thread"].astype(np.int64)
        last = int(threads.max())
        for thread in np.unique(threads[at]).tolist():
            own = at[threads[at] == thread]
            for lane in lanes(own, self._begin[own], self._returned[own])[1:]:
                last += 1
                threads[lane] = last
        return threads

    def _write_call(self, call: int, thread: int, stream: int) -> None:
        calls = self._calls
        kind, group = int(calls["kind"][call]), int(calls["group"][call])
        op, variant = self._kind(kind)[:2]
        flags, peer = int(calls["flags"][call]), int(calls["peer"][call])
        comms = self._comms(kind, group, int(calls["payload"][call]), int(calls["local"][call]), peer, flags)
        external, correlation = call + 1, _FIRST_CORRELATION + call
        ids = f'"{EXTERNAL_ID}": {external}'
        begin, returned = int(self._begin[call]), int(self._returned[call])
        if returned > begin and operation_of(f"c10d::{variant}") == op and self._kind(kind).api == "torch":
            self._event("cpu_op", f"c10d::{variant}", thread, begin, returned, ids)
        stated = f', "Call site": {_quoted(str(self._run.labels.text("site", calls["site"][call])))}'
        if calls["state"][call] in (State.BEGUN, State.FAILED):
            stated += f', "{MARK}": "{"not returned" if calls["state"][call] == State.BEGUN else "failed"}"'
        if stream:  # HTA finds the step of an operation in flight by the correlation
            stated += f', "correlation": {correlation}'
        if calls["tag"][call] >= 0 or op in MESSAGES or (op in OPERATIONS and OPERATIONS[op].is_one_sided):
            stated += f', "{TAG}": {calls["tag"][call]}'
        arguments = f'{ids}, {comms}, "Seq": {calls["seq"][call]}{stated}'
        self._event("cpu_op", COMMS, thread, begin, returned, arguments)
        if self._wait[call] >= 0:
            wait = int(self._wait[call])
            self._event("user_annotation", WAIT, thread, wait, max(wait, int(self._end[call])), ids)
        if stream:
            on_host = calls["t_start"][call] == 0
            backend = "" if not on_host else f" ({', '.join(filter(None, (self._backend(group), ON_HOST)))})"
            mark = f'"{MARK}": "{ON_HOST if on_host else "device"}", "{CLOCK}": "{_clock(int(calls["clock"][call]))}"'
            place = f'{ids}, "correlation": {correlation}, "device": {_DEVICE}, "stream": {stream}'
            name = f"ncclKernel_{op.title().replace('_', '')}{backend}"
            span = int(self._started[call]), int(self._end[call])
            self._event("kernel", name, stream, *span, f"{place}, {comms}, {mark}", pid=_DEVICE)

    def _comms_arguments(self, kind: int, group: int, payload: int, local: int, peer: int, flags: int) -> str:
        """Return the arguments that `record_param_comms` and kernels have, without braces."""
        op, _, _, dtype, _, sizes = self._kind(kind)
        recorded = self._run.labels.groups.get(group)
        is_uneven = op == "all_to_all" and (bool(flags & int(Flag.UNEVEN)) or sizes == "own share")
        arguments: dict[str, Any] = {"Collective name": "all_to_allv" if is_uneven else COLLECTIVE_NAMES.get(op, op)}
        if sizes != "payload":
            lengths = lengths_of(op, payload, local)
            name, width = SCALAR_TYPES.get(dtype, (dtype.title() if dtype.startswith("float8") else BYTE, 1))
            if any(length % width for length in lengths):
                name, width = BYTE, 1  # tensors of several types: the bytes are known
            sent, received = (length // width for length in lengths)
            splits = f"[{CUT}]" if is_uneven else "[]"
            if op != "barrier":
                arguments["dtype"] = name
            arguments |= {
                "In msg nelems": sent, "Out msg nelems": -1 if is_uneven else received,
                "In split size": splits, "Out split size": splits,
            }  # fmt: skip
        if recorded is not None:
            ranks = recorded.ranks
            strides = {*np.diff(ranks).tolist()}
            listed = str([*ranks]) if len(ranks) <= _LISTED_RANKS else f"{str([*ranks[:_LISTED_RANKS]])[:-1]}, {CUT}]"
            arguments |= {
                "Group size": len(ranks), "Process Group Name": _group_name(recorded),
                "Process Group Description": self._groups.get(recorded, ("", ""))[1], "Process Group Ranks": listed,
                "Global rank start": ranks[0], "Global rank stride": strides.pop() if len(strides) == 1 else -1,
            }  # fmt: skip
        if peer >= 0:
            arguments["Rank"] = _position(recorded, peer)
        if op in MESSAGES:
            arguments["Dst Rank" if op == "send" else "Src Rank"] = _position(recorded, peer)
        if flags:
            arguments[FLAGS] = flags_label(flags)
        return json.dumps(arguments)[1:-1]

    def _write_device_work(self, stream: int) -> None:
        """Write what else ran on the device, if the run was imported from a source that says it."""
        if self._process.device is None:
            return
        work, to_file = read_work(self._process.device), int(self._to_file[0])
        for kind, category, name in _DEVICE_WORK:
            stream += 1
            for begin, end in spans_of(work, kind).tolist():
                arguments = f'"device": {_DEVICE}, "stream": {stream}, "{MARK}": "union of all"'
                self._event(category, name, stream, begin + to_file, end + to_file, arguments, pid=_DEVICE)

    def _kind(self, kind: int) -> Kind:
        known: Kind = self._run.labels.kinds.get(kind, _NO_KIND)
        return known

    def _backend(self, group: int) -> str:
        """Return what carries out the calls of a group on the host."""
        recorded = self._run.labels.groups.get(group)
        config = self._groups.get(recorded, ("", ""))[0] if recorded is not None else ""
        return next((item.removeprefix("cpu:") for item in config.split(",") if not item.startswith("cuda:")), "")

    def _name(self, pid: int, kind: str, name: str, tid: int = 0) -> None:
        self._write_line(
            f'{{"ph": "M", "name": "{kind}", "pid": {pid}, "tid": {tid}, "ts": 0, "args": {{"name": {_quoted(name)}}}}}'
        )

    def _event(
        self, category: str, name: str, tid: int, begin: int, end: int, arguments: str = "", pid: int | None = None
    ) -> None:
        """Write a span. Times are us with three decimals, as torch.profiler writes them."""
        times = f'"ts": {int(begin) / 1000:.3f}, "dur": {int(end - begin) / 1000:.3f}'
        place = f'"pid": {self._pid if pid is None else pid}, "tid": {tid}'
        self._write_line(
            f'{{"ph": "X", "cat": "{category}", "name": {_quoted(name)}, {place}, {times}, "args": {{{arguments}}}}}'
        )

    def _write_line(self, line: str) -> None:
        self._file.write(f"{self._separator}\n{line}")
        self._separator = ","


@lru_cache(4096)
def _quoted(text: str) -> str:
    return json.dumps(text)


def _group_name(group: RecordedGroup) -> str:
    """Return a name that no other group of the process has: MPI's have none of their own."""
    return group.name if group.name and not group.index else group_label(group)


def _position(group: RecordedGroup | None, rank: int) -> int:
    """Return the position of a global rank in a group; -1: not known."""
    return group.ranks.index(rank) if group is not None and rank in group.ranks else -1


def _clock(clock: int) -> str:
    return Clock(clock).name.lower() if clock in Clock.__members__.values() else Clock.NONE.name.lower()
