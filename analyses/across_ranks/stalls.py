"""Stalls: what ranks that make no progress are doing.

A process writes samples of its stacks while it makes no progress (`commtrace.recording.stacks`). The last one counts if
the process did not close its log and no later call is known. A live process on this host whose drain thread takes no
turns is stopped, or one of its threads keeps the interpreter's lock (`Process.silence`), and no stack is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pandas as pd

from commtrace.analyses.fold_engine import NamedTables, RunAnalysis
from commtrace.analyses.table_specs import shared_columns as shared
from commtrace.analyses.table_specs.spec import TableSpec, column, duration, flag, share, text_column, word_column
from commtrace.formatting import format_moment
from commtrace.library_frames import is_library
from commtrace.reading.labels import short_paths
from commtrace.reading.process_reader import Process
from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.table_reader import StackSample, ThreadStack

STALLED_THREADS: Final = TableSpec("stalled_threads", "Ranks without progress",
    "A row per thread of a rank that made no progress when it was last seen, its main thread first. No rows for a "
    "process that closed its log.", (
    shared.RANK,
    text_column("thread", "thread", 'Name of the thread, which runs Python code; "" if no stack is known.'),
    flag("is_main", "", "Whether it is the main thread."),
    duration("stalled_ns", "for", "Time without progress: the begin of a call, or the return from one."),
    column("ns", format_moment, "since_ns", "since", "When it last made progress, since 1970-01-01 UTC.",
        optional=True),
    column("ns", format_moment, "sampled_ns", "at", "When its activity was observed, since 1970-01-01 UTC.",
        optional=True),
    flag("in_call", "in a call", "Whether the process was in a recorded call; missing if that is not known."),
    word_column("activity", "activity", 'What the thread did: "computing", "sleeping", "waiting for" '
        '"a lock or thread", "data", "a process" or "storage", "waiting while its child processes compute" or "... use '
        'storage", or just "waiting"; of a process whose stacks are not '
        'known "stopped", or "keeping the interpreter\'s lock, computing" (or waiting).'),
    text_column("function", "in",
        "Function of a library that the program's innermost line called, or that line's own function; missing if no "
        "stack is known.", shortenable=True),
    text_column("line", "called from", "The program's innermost line; missing if the thread has none.",
        shortenable=True),
    text_column("innermost", "innermost line", "The innermost line of the stack.", optional=True, shortenable=True),
    share("cpu_share", "processor",
        "Share of the time before the sample in which the thread was on a processor, or ready for one."),
    text_column("stack", "", "The stack, innermost line first, separated by \" < \"."),
), {"terminal": "rank thread stalled_ns activity function line", "page": "rank thread stalled_ns sampled_ns in_call "
    "activity function line innermost cpu_share"}, merge_by="rank")  # fmt: skip

_DTYPES: Final[Any] = {
    "is_main": bool, "stalled_ns": "Int64", "since_ns": "Int64", "sampled_ns": "Int64", "cpu_share": "float64",
    "function": object, "line": object,  # also if no rank has one
}  # fmt: skip
COMPUTES_FROM: Final = 0.5
"""Share of time on a processor, or ready for one, from which on a thread computes."""
COMPUTING: Final = "computing"
WAITING: Final = "waiting"
STOPPED: Final = "stopped"
STORAGE: Final = "waiting for storage"
CHILDREN: Final = "waiting while its child processes compute"
CHILDREN_STORAGE: Final = "waiting while its child processes use storage"
LOCK: Final = "keeping the interpreter's lock, "
_ACTIVITIES: Final = {
    **dict.fromkeys(("nanosleep", "clock_nanosleep"), "sleeping"),
    "futex": "waiting for a lock or thread",
    **dict.fromkeys(
        ("read", "readv", "pread64", "recvfrom", "recvmsg", "poll", "ppoll", "select", "pselect6", "epoll_wait",
         "epoll_pwait", "accept", "accept4"), "waiting for data"),
    **dict.fromkeys(("wait4", "waitid"), "waiting for a process"),
    **dict.fromkeys(("fsync", "fdatasync", "flock", "open", "openat"), STORAGE),
}  # fmt: skip
"""System call -> activity of a thread that is blocked in it."""
_ACTIVITIES_OF_STATES: Final = {
    "R": LOCK + COMPUTING,
    "S": LOCK + WAITING,
    "D": STORAGE,
}
"""State of a process in which a thread keeps the interpreter's lock -> activity."""


def find_stalls(run: RecordedRun) -> NamedTables:
    """Return the table `stalled_threads` of a run."""
    rows = [row for number, process in enumerate(run.processes) for row in _rows(run, number, process)]
    table = pd.DataFrame(rows, columns=STALLED_THREADS.column_names)
    return {"stalled_threads": table.astype(_DTYPES)}


def _rows(run: RecordedRun, number: int, process: Process) -> Iterator[dict[str, object]]:
    """Yield the rows of a process."""
    if process.tables.end is not None:
        return
    offset = run.labels.clock_offsets[number]
    if activity := _activity_of_silence(process):
        yield {
            "rank": process.rank,
            "is_main": True,
            "stalled_ns": process.live_at_ns - process.live_turn_ns,
            "since_ns": None if offset is None else process.live_turn_ns + offset,
            "sampled_ns": None if offset is None else process.live_at_ns + offset,
            "activity": activity,
        }
        return
    if (sample := process.tables.stacks) is not None and sample.calls >= _known_calls(process):
        # Of a live process that was in no call, it is known that it has begun none since.
        later_ns = max(0, process.ran_until_ns - sample.mono_ns) if not sample.in_call else 0
        short = short_paths(file for thread in sample.threads for file, _, _ in thread.frames)
        for thread in sample.threads:
            yield {
                "rank": process.rank,
                "thread": thread.name,
                "is_main": thread.is_main,
                "stalled_ns": sample.pause_ns + later_ns,
                "since_ns": None if offset is None else sample.mono_ns - sample.pause_ns + offset,
                "sampled_ns": None if offset is None else sample.mono_ns + offset,
                "in_call": sample.in_call,
                **_activity(thread, sample),
                **_place(thread.frames, short),
            }


def _known_calls(process: Process) -> int:
    """Return how many calls a process is known to have made."""
    records = sum(segment.count for segment in process.segments)
    return max(records + process.left_in_memory, process.counter("calls"))


def _activity(thread: ThreadStack, sample: StackSample) -> dict[str, object]:
    """Return what a thread did, and its share of processor time."""
    window_ns = sample.window_ns
    cpu_share = min(1.0, thread.cpu_ns / window_ns) if thread.cpu_ns is not None and window_ns else None
    # A thread that waits for the interpreter's lock, which the sampling thread has, looks as if it waited for any lock.
    if cpu_share is not None and cpu_share >= COMPUTES_FROM:
        activity = COMPUTING
    elif thread.state == "D" or thread.storage_bytes:  # between two writes, it is in no system call
        activity = STORAGE
    elif thread.is_main and window_ns and sample.children_cpu_ns / window_ns >= COMPUTES_FROM:
        activity = CHILDREN  # as compilers, and workers of a data loader
    elif thread.is_main and sample.children_use_storage:
        activity = CHILDREN_STORAGE
    else:
        activity = _ACTIVITIES.get(thread.system_call, WAITING)
    return {"activity": activity, "cpu_share": cpu_share}


def _activity_of_silence(process: Process) -> str:
    """Return what a live process does that takes no turns; "": it takes some, or may go on."""
    if process.silence == "lock":
        return _ACTIVITIES_OF_STATES.get(process.live_state, "")
    return STOPPED if process.silence == "stopped" else ""


def _place(frames: Sequence[tuple[str, int, str]], short: Mapping[str, str]) -> dict[str, str | None]:
    """Return where a stack is: see the columns of the table."""
    if not frames:
        return {}
    texts = [f"{short[file]}:{line} {function}" for file, line, function in frames]
    own = next((at for at, (file, _, _) in enumerate(frames) if not is_library(file)), None)
    if own is None:
        return {"function": texts[0], "line": None, "innermost": texts[0], "stack": " < ".join(texts)}
    called = texts[max(0, own - 1)]
    return {"function": called, "line": texts[own], "innermost": texts[0], "stack": " < ".join(texts)}


ANALYSIS: Final = RunAnalysis("stalled_threads", find_stalls)
"""It reads no records."""
