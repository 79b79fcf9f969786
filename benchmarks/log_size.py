"""Bytes on disk per communication call, and of a rank's tables in small and large jobs.

Per call: all files of commtrace's log, and torch.profiler's Chrome trace. They are recorded on a fake process group,
where the profiler records one event per call; on real groups, it records more. The tables are those of the last rank of
a dry run.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import commands
import groups
import results
import sides
import torch
import torch.distributed as dist
import torch.profiler
from measuring import Row

from commtrace.run import Run

CASE = "bytes on disk per call"
TABLES = ("tables of a rank, fewest ranks", "tables of a rank, most ranks")
JOBS = {
    "DDP": (2, ["--engine", "ddp"], {}),
    "ZeRO-3": (2, ["--zero-stage", "3"], {}),
    "tensor (2), pipeline (2), data": (8, [], {"model_parallel_size": 2, "pipe_parallel_size": 2}),
}
"""Job -> smallest number of ranks, options of examples/gpt_neox, and keys of its configuration."""
ROOT = Path(__file__).parents[1]
RING_RECORDS = 1 << 18  # none may be dropped, although a loop makes the calls as fast as it can


def main() -> None:
    """Run the benchmark and write its results."""
    parser = results.parser(__doc__)
    parser.add_argument("--calls", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="calls in each log")
    parser.add_argument("--ranks", type=int, default=10_000, help="ranks of the large jobs (%(default)s)")
    parser.add_argument("--jobs", nargs="+", default=[*JOBS], choices=[*JOBS], help="jobs whose tables are measured")
    options = results.parsed(parser, calls=[100, 1000], ranks=16, jobs=["DDP"])
    of_tables = [row for job in options.jobs for row in tables(job, options.ranks)]
    results.write("log_size", groups.run(sizes, options, backend="fake") + of_tables, options)


def sizes(options: argparse.Namespace) -> list[Row]:
    """Return a row per log and per trace."""
    call = partial(dist.all_reduce, torch.ones(1024))
    rows = [of_log(calls, call) for calls in options.calls]
    return rows + of_traces(min(options.calls), call)


def of_log(calls: int, call: partial[object]) -> Row:
    """Return the bytes per call of commtrace's log."""
    bytes_per_call: list[float] = []

    def read(run: Run, directory: Path) -> None:
        recorded = sum(segment.count for process in run.processes for segment in process.segments)
        assert recorded == calls, f"{recorded} of {calls}"
        bytes_per_call.append(bytes_in(directory) / recorded)

    with sides.traced(sides.recorders()[-1], read=read, ring_records=RING_RECORDS):
        for _ in range(calls):
            call()
    return groups.shown(Row(CASE, f"commtrace, {calls:,} calls", "B", bytes_per_call[0]))


def of_traces(calls: int, call: partial[object]) -> list[Row]:
    """Return the bytes per call of the profiler's trace, plain and compressed."""
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


def tables(job: str, large: int) -> list[Row]:
    """Return the size of the last rank's tables in the smallest job and in a large one."""
    small, options, keys = JOBS[job]
    rows = []
    for name, ranks in zip(TABLES, (small, large), strict=True):
        with tempfile.TemporaryDirectory() as folder:
            config, log = Path(folder, "config.yml"), Path(folder, "log")
            config.write_text(json.dumps(keys))
            train = [sys.executable, "-m", "examples.gpt_neox.train", "tiny", str(config), "--train-iters", "2"]
            command = commands.commtrace("dryrun", "--world-size", str(ranks), "--ranks", str(ranks - 1), "--out", log)
            subprocess.run([*command, *train, *options], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            (file,) = log.rglob("*.jsonl")
            rows.append(Row(f"{job}: {small} or {large:,} ranks", name, "B", file.stat().st_size))
            results.show(rows[-1])
    return rows


def bytes_in(folder: Path) -> int:
    """Return the size of all files in a directory."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


if __name__ == "__main__":
    main()
