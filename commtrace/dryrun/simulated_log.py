"""Log of a simulated rank, made from its records: marked as simulated, and without times.

Times of a dry run say nothing about the job. In the log, `t_begin` is the number of the call in the process, from 1: an
order, not a time. Two dry runs of a program therefore write the same records.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from commtrace.rank_ranges import format_rank_list
from commtrace.reading.process_reader import Process
from commtrace.recording.segment_writer import SegmentSeries
from commtrace.schema import RECORD, Clock, Flag, Records, State
from commtrace.settings import Settings

from .isolation.file_changes import FileChange

_TIMES: Final = ("t_return", "t_wait", "t_start", "t_end")
_COSTS: Final = (
    "cost_samples", "cost_ns", "cost_p99_ns", "first_calls", "first_ns", "steady_samples", "steady_ns", "drain_cpu_ns",
)  # fmt: skip
_DONE: Final = (int(State.RETURNED), int(State.COMPLETE))


def write_simulated_log(
    process: Process,
    folder: Path,
    settings: Settings,
    device: str,
    stands_for: Sequence[int] = (),
    *,
    changes: Sequence[FileChange] = (),
    failure: str = "",
) -> int:
    """Write the log of a process that has ended.

    Args:
        process: The log that was recorded.
        folder: Directory to write to.
        settings: Sizes of the segments.
        device: The device of the program: "cpu", or "cuda" if devices were simulated.
        stands_for: The ranks that this one represents, itself included; empty: only itself.
        changes: The files that the rank would have changed.
        failure: How the rank failed, or "". The log of a rank that failed has no end.

    Returns:
        The number of records.

    Raises:
        OSError: The log cannot be written; its files have been removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    blocks = [block for segment in process.segments for block in segment.blocks()]
    recorded = np.concatenate([np.zeros(0, RECORD), *blocks])
    records = without_times(recorded)
    stem = process.path.stem
    try:
        smallest, largest = settings.segment_min_bytes, settings.segment_max_bytes
        series = SegmentSeries(folder, stem, smallest=smallest, largest=largest, max_bytes=settings.max_bytes)
        series.append(records)
        series.close()
        rows = [*_rows(process.path, device, failure, np.sort(recorded["t_begin"]))]
        rows += ({"table": "writes", "path": path, "change": change, "bytes": size} for path, change, size in changes)
        if stands_for:
            rows.append({"table": "stands_for", "ranks": format_rank_list(stands_for), "count": len(stands_for)})
        (folder / f"{stem}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    except BaseException:
        for file in folder.glob(f"{stem}.*"):
            file.unlink(missing_ok=True)
        raise
    return len(records)


def without_times(records: Records) -> Records:
    """Return the records in the order of their calls, numbered and without times."""
    ordered = records[np.argsort(records["t_begin"], kind="stable")]
    ordered["t_begin"] = np.arange(1, len(ordered) + 1)
    for name in _TIMES:
        ordered[name] = 0
    ordered["clock"] = Clock.NONE
    ordered["flags"] |= np.uint8(Flag.SIMULATED)
    ordered["state"][np.isin(ordered["state"], _DONE)] = State.UNOBSERVABLE
    return ordered


def _rows(path: Path, device: str, failure: str, begins: npt.NDArray[np.int64]) -> Iterator[dict[str, Any]]:
    """Yield the rows of the tables, without clocks, groups of other ranks, and the cost of recording."""
    # topology: the groups of the whole job, which the dry run has read. A log without an end is incomplete.
    # stacks: where a rank paused, which says nothing about the job.
    left_out = ("clock", "stacks", "topology", "flops", "end") if failure else ("clock", "stacks", "topology")
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut off when the process was killed
        row.pop("mono_ns", None)
        if row["table"] == "process":
            row.update(simulated=True, simulated_device="cuda" if device == "cuda" else "cpu")
            if failure:
                row["failure"] = failure
        elif row["table"] in left_out:
            continue
        elif row["table"] == "flops":
            yield {"table": "flops", **flops_between_calls(begins, row["moments"], row["flops"], row["is_forward"])}
            continue
        elif row["table"] == "stats":
            row.update(dict.fromkeys(_COSTS, 0))
        yield row


def flops_between_calls(
    begins: npt.NDArray[np.int64], moments: Sequence[int], flops: Sequence[int], is_forward: Sequence[bool]
) -> dict[str, list[int]]:
    """Return the operations before each call that is not directly after another one.

    Args:
        begins: When the calls began, CLOCK_MONOTONIC, ascending, shape (calls,).
        moments: When operations were computed.
        flops: How many.
        is_forward: Whether that was outside of backward.

    Returns:
        `calls`: the number of the call, from 1, that follows them, or one more than the number of calls; `flops`;
        `forward`: those outside of backward.
    """
    following = np.searchsorted(begins, np.asarray(moments, np.int64), side="right")
    calls, number = np.unique(following, return_inverse=True)
    sums, forward = [0] * len(calls), [0] * len(calls)  # Python's integers: a large step may exceed 64 bits
    for at, count, outside in zip(number.tolist(), flops, is_forward, strict=True):
        sums[at] += count
        forward[at] += count * outside
    return {"calls": (calls + 1).tolist(), "flops": sums, "forward": forward}
