"""What a report over a long log takes: seconds from the command to its end, and memory of all its processes.

Beside it DuckDB, which groups the events of the same run, exported to Parquet beforehand, by what the report's tables
are keyed by. Of the page: megabytes, and seconds until Chromium, already running, has drawn its last figure. The log is
one of a few real steps on a fake process group, repeated with later steps and times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

import groups
import numpy as np
import results
import sides
import torch
import torch.distributed as dist
from measuring import Row

import commtrace
from commtrace.run import Run
from commtrace.schema import Records

CASE = "report over {:,} events"
RANKS, STEPS, CALLS = 8, 20, 500
SEGMENT = 600_000  # records; what COMMTRACE_SEGMENT_MAX_BYTES allows

KEYS = (
    ("op",), ("role",), ("role", "op"), ("phase",), ("site", "op"), ("step", "op"), ("op", "payload_bytes"), ("state",),
    ("rank",),
)  # fmt: skip
DUCKDB = """
import sys, duckdb
duckdb.execute("set threads to {threads}")
sums = "count(*), sum(payload_bytes), sum(wire_bytes)"
for keys in {keys}:
    names = ", ".join(keys)
    duckdb.sql(f"select {{names}}, {{sums}} from '{file}' group by {{names}}").fetchall()
times = "quantile_cont(t, [0.5, 0.99]), max(t), sum(t), min(t_begin_ns), max(t_end_ns)"
events = "(select *, t_return_ns - t_begin_ns as t from '{file}')"
duckdb.sql(f"select op, {{times}} from {{events}} group by op").fetchall()
"""

OPEN = """
import json, sys, time
from playwright.sync_api import sync_playwright
chromium, page, times = sys.argv[1:]
seconds = []
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
    for _ in range(int(times)):
        tab = browser.new_page()
        begun = time.perf_counter()
        tab.goto(page)
        tab.wait_for_selector("html[data-drawn]", timeout=60_000)
        seconds.append(time.perf_counter() - begun)
        tab.close()
    browser.close()
print(json.dumps(seconds))
"""


class Taken(NamedTuple):
    """By a command."""

    seconds: float
    mebibytes: float


def main() -> None:
    """Measure."""
    parser = results.parser(__doc__, pairs=3)
    parser.add_argument("--events", type=int, nargs="+", default=[1_000_000, 20_000_000], help="of each log")
    options = results.parsed(parser, events=[20_000])
    results.write("report", groups.run(reports, options, backend="fake"), options)


def reports(options: argparse.Namespace) -> list[Row]:
    """Rows for each length of log."""
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder, "small")
        record(small)
        return [row for events in options.events for row in of_log(small, Path(folder, str(events)), events, options)]


def of_log(small: Path, long: Path, events: int, options: argparse.Namespace) -> list[Row]:
    """The report's, and DuckDB's, of a log of so many events."""
    lengthen(commtrace.open(small), long, events)
    case = CASE.format(events)
    sides = {"commtrace report": [sys.executable, "-m", "commtrace.cli", "report", str(long)]}
    if find_spec("duckdb") is not None:
        file = long.with_suffix(".parquet")
        subprocess.run([sys.executable, "-m", "commtrace.cli", "export", long, "--out", file], check=True)
        script = DUCKDB.format(threads=os.cpu_count(), keys=[list(keys) for keys in KEYS], file=file)
        sides["DuckDB, the same groups from Parquet"] = [sys.executable, "-c", script]
    taken: dict[str, list[Taken]] = {name: [] for name in sides}
    for _ in range(options.pairs):
        for name, command in sides.items():
            taken[name].append(measured(command))
    rows = []
    for name, each in taken.items():
        rows.append(groups.shown(Row(case, name, "s", float(np.median([one.seconds for one in each])))))
        rows.append(groups.shown(Row(f"{case}, memory", name, "MiB", max(one.mebibytes for one in each))))
    return rows + of_page(long, case, options.pairs)


def of_page(log: Path, case: str, times: int) -> list[Row]:
    """Its size, and how long a browser takes to open it; nothing where there is none."""
    chromium = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := which(name))), None)
    if chromium is None or find_spec("playwright") is None:
        return []
    file = log.with_suffix(".html")
    subprocess.run([sys.executable, "-m", "commtrace.cli", "report", log, "--html", file], check=True)
    command = [sys.executable, "-c", OPEN, chromium, file.as_uri(), str(times)]
    seconds = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    size = Row(f"{case}, size", "its page", "MB", file.stat().st_size / 1e6)
    return [groups.shown(Row(case, "its page, in Chromium", "s", float(np.median(seconds)))), groups.shown(size)]


# ---- the log ---------------------------------------------------------------------------------------------------------


def record(folder: Path) -> None:
    """Steps of several operations, sizes and lines of code."""
    tensors = [torch.ones(1 << size) for size in range(4, 16)]
    gathered = [torch.empty(8 * len(tensor)) for tensor in tensors]
    sides.set_environment(recorder=sides.recorders()[-1])
    commtrace.start(folder)
    for _ in range(STEPS):
        for call in range(CALLS // 2):
            number = call % len(tensors)
            dist.all_reduce(tensors[number])
            dist.all_gather_into_tensor(gathered[number], tensors[number])
        commtrace.step()
    commtrace.stop()


def lengthen(run: Run, folder: Path, events: int) -> None:
    """A log of so many events, the same on every rank."""
    (process,) = run.processes
    records = np.concatenate([block for segment in process.segments for block in segment.blocks()])
    times, span = repeats(records), int(records["t_end"].max() - records["t_begin"].min()) + 1
    each = events // RANKS
    tables = process.segments[0].path.parent / f"{process.segments[0].path.name.split('.')[0]}.jsonl"
    lines = [json.loads(line) for line in tables.read_text().splitlines()]
    for rank in range(RANKS):
        host = folder / run.id / "host"
        host.mkdir(parents=True, exist_ok=True)
        stem = f"rank{rank:05d}-{1000 + rank}"
        for number, begin in enumerate(range(0, each, SEGMENT)):
            rows = np.arange(begin, min(begin + SEGMENT, each))
            part = records[rows % len(records)]
            turn = rows // len(records)
            part["step"] += (turn * times).astype(part["step"].dtype)
            for name in ("t_begin", "t_return", "t_wait", "t_end"):
                part[name] += np.where(part[name] > 0, turn * span, 0)
            np.save(host / f"{stem}.{number:05d}.npy", part)
        (host / f"{stem}.jsonl").write_text("".join(json.dumps(of_rank(line, rank, each)) + "\n" for line in lines))


def repeats(records: Records) -> int:
    """By how much the step grows from one saying to the next."""
    return int(records["step"].max()) + 1


def of_rank(line: dict[str, Any], rank: int, calls: int) -> dict[str, Any]:
    """A line of the tables, of another rank."""
    own: dict[str, dict[str, Any]] = {
        "process": {"rank": rank, "pid": 1000 + rank, "host": "host"},
        "stats": {"calls": calls},
    }
    return {**line, **own.get(line["table"], {})}


# ---- measuring -------------------------------------------------------------------------------------------------------


def measured(command: list[str]) -> Taken:
    """Run it to its end."""
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        most, ended = [0.0], threading.Event()
        watch = threading.Thread(target=watched, args=(process.pid, most, ended))
        watch.start()
        status = process.wait()
        seconds = time.perf_counter() - begun
        ended.set()
        watch.join()
    assert status == 0, command
    return Taken(seconds, most[0] / 1024)


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


if __name__ == "__main__":
    main()
