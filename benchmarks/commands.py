"""Time and memory of a command and its child processes, and the commands that read a long log."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

KEYS = (
    ("op",), ("role",), ("role", "op"), ("phase",), ("site", "op"), ("step", "op"), ("op", "payload_bytes"), ("state",),
    ("rank",),
)  # fmt: skip
DUCKDB = """
import sys, time, duckdb
begun = time.perf_counter()
duckdb.execute("set threads to {threads}")
duckdb.execute("set enable_progress_bar = false")  # it writes to standard output after two seconds
sums = "count(*), sum(payload_bytes), sum(wire_bytes)"
for keys in {keys}:
    names = ", ".join(keys)
    duckdb.sql(f"select {{names}}, {{sums}} from '{files}' group by {{names}}").fetchall()
times = "quantile_cont(t, [0.5, 0.99]), max(t), sum(t), min(t_begin_ns), max(t_end_ns)"
events = "(select *, t_return_ns - t_begin_ns as t from '{files}')"
duckdb.sql(f"select op, {{times}} from {{events}} group by op").fetchall()
print(time.perf_counter() - begun)
"""
GROUPINGS = """
import sys, time
import pyarrow.parquet
from commtrace.analyses import host_times, coverage, message_sizes, steps, volume_tables
from commtrace.analyses.fold_engine import fold
from commtrace.run import open_run
analyses = *volume_tables.ANALYSES, volume_tables.BY_RANK, steps.ANALYSIS, message_sizes.ANALYSIS, coverage.ANALYSIS
begun = time.perf_counter()
tables = fold(open_run(sys.argv[1]), (*analyses, host_times.ANALYSIS))
print(time.perf_counter() - begun)
assert all(len(tables[name]) for name in ("volume_by_site", "message_sizes", "host_time", "ranks"))
"""
"""Script that computes the tables that group events. Like DUCKDB, it prints its seconds without imports."""


class Taken(NamedTuple):
    """Resources that a command used."""

    seconds: float
    processor: float
    """Seconds of CPU time, which does not grow when other programs use the cores."""
    mebibytes: float


def commtrace(command: str, *arguments: str | Path) -> list[str]:
    """Return a command of commtrace."""
    return [sys.executable, "-m", "commtrace.cli", command, *map(str, arguments)]


def duckdb(files: str) -> dict[str, list[str]]:
    """Return the command with which DuckDB groups events in Parquet files by the report's keys; {} without DuckDB."""
    if find_spec("duckdb") is None:
        return {}
    script = DUCKDB.format(threads=os.cpu_count(), keys=[list(keys) for keys in KEYS], files=files)
    return {"DuckDB, the same groups from Parquet": [sys.executable, "-c", script]}


def groupings(log: Path) -> dict[str, list[str]]:
    """Return the command with which commtrace groups the events of any log in the same way."""
    return {"tables that are groupings": [sys.executable, "-c", GROUPINGS, str(log)]}


def measured_inside(command: list[str]) -> float:
    """Return the seconds that a command prints. Raise CalledProcessError if it fails."""
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measured(command: list[str], *statuses: int) -> Taken:
    """Run a command to its end. Raise AssertionError if its status is neither 0 nor in `statuses`."""
    before, begun = os.times(), time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process, peak_memory(process.pid) as peak_kib:
        status = process.wait()
        seconds = time.perf_counter() - begun
    assert status in (0, *statuses), (status, command)
    after = os.times()
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    return Taken(seconds, processor, peak_kib[0] / 1024)


@contextmanager
def peak_memory(pid: int) -> Iterator[list[float]]:
    """Keep in a list the peak memory of a process and its descendants in KiB; shared pages are split among users."""
    peak_kib, ended = [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            peak_kib[0] = max(peak_kib[0], sum(proportional_kib(member) for member in family(pid)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak_kib
    finally:
        ended.set()
        watcher.join()


def family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(member for child in children for member in family(int(child)))]


def proportional_kib(pid: int) -> float:
    """Return the proportional set size of a process in KiB; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(float(line.split()[1]) for line in lines if line.startswith("Pss:"))
