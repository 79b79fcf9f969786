"""From what a simulated rank recorded to its log: marked as simulated, and without times.

Its processor was at work on nothing, so its times say nothing of the job's. In the log a call's `t_begin` is its number
in the process, from 1: an order and no time. So two dry runs of one program write the same records.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from commtrace.formatting import format_ranks
from commtrace.reading.log import Process
from commtrace.recording.segment_writer import SegmentSeries
from commtrace.schema import RECORD, Clock, Flag, Records, State
from commtrace.settings import Settings

_TIMES: Final = ("t_return", "t_wait", "t_start", "t_end")
_COSTS: Final = ("cost_samples", "cost_ns", "cost_p99_ns", "drain_cpu_ns")
_DONE: Final = (int(State.RETURNED), int(State.COMPLETE))


def write_simulated_log(process: Process, folder: Path, settings: Settings, alike: Sequence[int] = ()) -> int:
    """Write the log of a process that has ended into `folder`; returns the number of its records.

    `alike`: the ranks that it was run for, where it stands for others.

    Raises OSError. What is half-written is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    records = without_times(np.concatenate([np.zeros(0, RECORD), *_blocks(process)]))
    stem = process.path.stem
    try:
        series = SegmentSeries(
            folder,
            stem,
            smallest=settings.segment_min_bytes,
            largest=settings.segment_max_bytes,
            max_bytes=settings.max_bytes,
        )
        series.append(records)
        series.close()
        rows = [*_rows(process.path)]
        if alike:
            rows.append({"table": "stands_for", "ranks": format_ranks(alike), "count": len(alike)})
        (folder / f"{stem}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    except BaseException:
        remove_log(folder, stem)
        raise
    return len(records)


def remove_log(folder: Path, stem: str) -> None:
    """Take a process's log away."""
    for file in folder.glob(f"{stem}.*"):
        file.unlink(missing_ok=True)


def without_times(records: Records) -> Records:
    """In the order in which they were made, numbered, and without anything that a clock said."""
    ordered = records[np.argsort(records["t_begin"], kind="stable")]
    ordered["t_begin"] = np.arange(1, len(ordered) + 1)
    for name in _TIMES:
        ordered[name] = 0
    ordered["clock"] = Clock.NONE
    ordered["flags"] |= np.uint8(Flag.SIMULATED)
    ordered["state"][np.isin(ordered["state"], _DONE)] = State.UNOBSERVABLE
    return ordered


def _blocks(process: Process) -> Iterator[Records]:
    for segment in process.segments:
        yield from segment.blocks()


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The tables, without the clocks and without what recording cost."""
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut as its process was killed
        row.pop("mono_ns", None)
        if row["table"] == "process":
            row["simulated"] = True
        elif row["table"] == "clock":
            continue
        elif row["table"] == "stats":
            row.update(dict.fromkeys(_COSTS, 0))
        yield row
