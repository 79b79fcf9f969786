"""What a command takes from its start to its end, of all its processes; and the commands that read a long log."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
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
from commtrace.analyses import call_times, coverage, message_sizes, steps, volume
from commtrace.analyses.fold_engine import fold
from commtrace.run import open_run
analyses = *volume.ANALYSES, volume.BY_RANK, steps.ANALYSIS, message_sizes.ANALYSIS, coverage.ANALYSIS
begun = time.perf_counter()
tables = fold(open_run(sys.argv[1]), (*analyses, call_times.ANALYSIS))
print(time.perf_counter() - begun)
assert all(len(tables[name]) for name in ("volume_by_site", "message_sizes", "host_time", "ranks"))
"""
"""The tables that are groupings of the events. Like DuckDB's script, it prints its seconds without those of imports."""


class Taken(NamedTuple):
    """By a command."""

    seconds: float
    processor: float
    """Seconds of CPU time, which does not grow when other programs take the cores."""
    mebibytes: float


def commtrace(command: str, *arguments: str | Path) -> list[str]:
    """A command of commtrace."""
    return [sys.executable, "-m", "commtrace.cli", command, *map(str, arguments)]


def duckdb(files: str) -> dict[str, list[str]]:
    """DuckDB, which groups the events in Parquet files by the keys of the report; nothing where it is not installed."""
    if find_spec("duckdb") is None:
        return {}
    script = DUCKDB.format(threads=os.cpu_count(), keys=[list(keys) for keys in KEYS], files=files)
    return {"DuckDB, the same groups from Parquet": [sys.executable, "-c", script]}


def groupings(log: Path) -> dict[str, list[str]]:
    """The same groupings by commtrace, of any log."""
    return {"tables that are groupings": [sys.executable, "-c", GROUPINGS, str(log)]}


def measured_inside(command: list[str]) -> float:
    """Seconds that a command prints. Raises CalledProcessError where it fails."""
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measured(command: list[str], *statuses: int) -> Taken:
    """Run it to its end, with status 0 or one of these. Raises AssertionError where it ends with another one."""
    before, begun = os.times(), time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        most, ended = [0.0], threading.Event()
        watch = threading.Thread(target=watched, args=(process.pid, most, ended))
        watch.start()
        status = process.wait()
        seconds = time.perf_counter() - begun
        ended.set()
        watch.join()
    assert status in (0, *statuses), (status, command)
    after = os.times()
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    return Taken(seconds, processor, most[0] / 1024)


def watched(pid: int, most: list[float], ended: threading.Event) -> None:
    """The most KiB that the process and its children had at a time, shared pages divided among those who share them."""
    while not ended.wait(0.1):
        most[0] = max(most[0], sum(proportional(one) for one in family(pid)))


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(one for child in children for one in family(int(child)))]


def proportional(pid: int) -> float:
    """KiB of memory, 0 where the process has gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(float(line.split()[1]) for line in lines if line.startswith("Pss:"))
