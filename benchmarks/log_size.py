"""Bytes on disk for each communication call: commtrace's log, all its files, and torch.profiler's chrome trace.

On a fake process group, where the profiler sees one event a call; of real ones it sees more.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
from functools import partial
from pathlib import Path

import groups
import results
import sides
import torch
import torch.distributed as dist
import torch.profiler
from measuring import Row

from commtrace.run import Run

CASE = "bytes on disk per call"
RING_RECORDS = 1 << 18  # calls come here as fast as a loop can make them, and none may be lost


def main() -> None:
    """Measure."""
    parser = results.parser(__doc__)
    parser.add_argument("--calls", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="of each log")
    options = results.parsed(parser, calls=[100, 1000])
    results.write("log_size", groups.run(sizes, options, backend="fake"), options)


def sizes(options: argparse.Namespace) -> list[Row]:
    """A row per log."""
    call = partial(dist.all_reduce, torch.ones(1024))
    rows = [of_log(calls, call) for calls in options.calls]
    return rows + of_traces(min(options.calls), call)


def of_log(calls: int, call: partial[object]) -> Row:
    """commtrace's."""
    found: list[float] = []

    def read(run: Run, directory: Path) -> None:
        recorded = sum(segment.count for process in run.processes for segment in process.segments)
        assert recorded == calls, f"{recorded} of {calls}"
        found.append(bytes_in(directory) / recorded)

    with sides.traced(sides.recorders()[-1], read=read, ring_records=RING_RECORDS):
        for _ in range(calls):
            call()
    return groups.shown(Row(CASE, f"commtrace, {calls:,} calls", "B", found[0]))


def of_traces(calls: int, call: partial[object]) -> list[Row]:
    """The profiler's, plain and compressed."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(calls):
            call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        trace = path.read_bytes()
    lengths = {"trace.json": len(trace), "trace.json.gz": len(gzip.compress(trace))}
    return [
        groups.shown(Row(CASE, f"torch.profiler's {name}, {calls:,} calls", "B", length / calls))
        for name, length in lengths.items()
    ]


def bytes_in(folder: Path) -> int:
    """Of all files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


if __name__ == "__main__":
    main()
