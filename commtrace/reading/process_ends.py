"""How each process of a run ended, and when, from its own log and from those of the processes that outlived it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from .process_reader import Process
from .segment_reader import last_records
from .table_reader import Row, integer_or_none

State = Literal["runs", "stopped", "ended", "died", "unknown"]

_LAST: Final = 256
"""Number of last records of a process among which its last step is searched for."""


@dataclass(frozen=True)
class ProcessEnd:
    """The end of one process.

    Attributes:
        state: "ended": it closed its log at its end; "died": it did not; "stopped": it switched tracing off before;
            "runs": it ran when its memory was read; "unknown": it runs or died, on another host.
        exception: The exception that ended its program, as in the row `leaving`; None: none, or not known.
        status: Its exit status; None: not known, or a signal ended it.
        signal: Number of the signal that ended it; None: none, or not known.
        out_of_memory_ns: Time before its end within which the kernel ended a process of its cgroup for lack of memory;
            None: it did not, or that is not known.
        earliest_ns: Monotonic time of its host before which it had not ended; if it runs, when it was last seen.
        latest_ns: Monotonic time by which it had ended; None: not known.
    """

    state: State
    exception: Row | None
    status: int | None
    signal: int | None
    out_of_memory_ns: int | None
    earliest_ns: int
    latest_ns: int | None

    @property
    def is_failure(self) -> bool:
        """Whether its program did not run to its end: an exception, a signal or another status than 0 is known."""
        return self.exception is not None or self.signal is not None or bool(self.status)

    @property
    def is_cut(self) -> bool:
        """Whether its last step may lack calls."""
        return self.state not in ("ended", "stopped") or self.is_failure


def process_ends(processes: Sequence[Process]) -> list[ProcessEnd]:
    """Return the end of each process."""
    seen: dict[tuple[str, int, int], list[Row]] = defaultdict(list)
    for process in processes:
        for row in process.tables.peer_ends:
            seen[process.host, row["pid"], row["rank"]].append(row)
    names = [(process.host, process.pid, process.rank) for process in processes]
    counts = Counter(names)
    return [
        _process_end(process, seen[name] if counts[name] == 1 else ())
        for process, name in zip(processes, names, strict=True)
    ]


def _process_end(process: Process, rows: Iterable[Row]) -> ProcessEnd:
    """Return the end of a process, given what others recorded of it."""
    tables, rows = process.tables, [*rows]
    statuses = {*(integer_or_none(row.get("status")) for row in rows)} - {None}
    wait_status = statuses.pop() if len(statuses) == 1 else None
    leaving, end = tables.leaving or {}, tables.end
    signal: int | None = None
    status: int | None = None
    aborts = leaving.get("aborts") is True  # the launcher then kills it, too
    if wait_status is not None and not aborts:
        signal, status = (wait_status & 0x7F or None), wait_status >> 8
        status = None if signal else status
    elif tables.exit_status is not None:
        status = tables.exit_status
    else:
        status = integer_or_none(leaving.get("status"))
    memory = [ns for row in rows if (ns := integer_or_none(row.get("oom_ns"))) is not None]
    state = _state(process, has_ended=wait_status is not None)
    left_ns = integer_or_none(leaving.get("mono_ns")) or (integer_or_none((end or {}).get("mono_ns")) or 0)
    exception = leaving.get("exception")
    if left_ns and state != "stopped" and not (signal and exception is None):
        latest: int | None = left_ns
        earliest = left_ns
    else:
        earliest = max(left_ns, _last_seen_ns(process))
        times = [row["mono_ns"] for row in rows if row["mono_ns"] >= earliest]
        latest = min(times, default=None) if state != "runs" else None
    return ProcessEnd(
        state, exception, status, signal, min(memory, default=None), earliest, latest,
    )  # fmt: skip


def _state(process: Process, *, has_ended: bool) -> State:
    end = process.tables.end
    if end is not None:
        return "stopped" if end.get("reason") == "stop" and not has_ended else "ended"
    if process.tables.salvage or has_ended:
        return "died"
    return "runs" if process.live_at_ns else "unknown"


def _last_seen_ns(process: Process) -> int:
    """Return the last time at which a process is known to have run."""
    tables = process.tables
    rows: list[Mapping[str, object]] = [
        tables.process, tables.stats or {}, tables.end or {},
        *tables.clock, *tables.peer_ends, *tables.thread_exceptions,
    ]  # fmt: skip
    return max(process.live_at_ns, *(integer_or_none(row.get("mono_ns")) or 0 for row in rows))


def last_step(process: Process) -> int | None:
    """Return the step in which a process was when it ended; -1: before its first step; None: not known."""
    step = integer_or_none((process.tables.leaving or {}).get("step"))
    return step if step is not None else last_recorded_step(process)


def last_recorded_step(process: Process) -> int | None:
    """Return the last step of which a process recorded a call; -1: before its first step; None: no call is known."""
    if process.summary is not None:
        steps = process.summary.table("steps")["last"]
        return int(steps.max()) if len(steps) else None
    blocks = (block["step"] for segment in last_records(process.segments, _LAST) for block in segment.blocks())
    return max((int(steps.max()) for steps in blocks if len(steps)), default=None)
