"""Wall time of a report over a long log, and memory of all its processes.

For comparison, DuckDB groups the events of the same run, exported to Parquet beforehand, by the keys of the report's
tables. For the HTML page: its size, and the seconds until Chromium, already running, has drawn the last figure. The log
has a few recorded steps on a fake process group, the last of them repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import commands
import groups
import numpy as np
import results
import sides
import torch
import torch.distributed as dist
from measuring import Row
from repeated_logs import Repetition, write_repeated

import commtrace

CASE = "report over {:,} calls"
RANKS, STEPS, CALLS = 8, 20, 500

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


def main() -> None:
    """Run the benchmark and write its results."""
    parser = results.parser(__doc__, pairs=3)
    parser.add_argument("--events", type=int, nargs="+", default=[1_000_000, 20_000_000], help="calls in each log")
    options = results.parsed(parser, events=[100_000])
    results.write("report", groups.run(reports, options, backend="fake"), options)


def reports(options: argparse.Namespace) -> list[Row]:
    """Return the rows for each length of log."""
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder, "small")
        record(small)
        return [row for events in options.events for row in of_log(small, Path(folder, str(events)), events, options)]


def of_log(small: Path, long: Path, events: int, options: argparse.Namespace) -> list[Row]:
    """Return the rows of the report and of DuckDB for a log of `events` calls."""
    repeats = events // RANKS // CALLS - (STEPS - 1)
    write_repeated(small, long, Repetition(RANKS, repeats, together=True))
    case = CASE.format(events)
    file = long.with_suffix(".parquet")
    subprocess.run(commands.commtrace("export", long, "--out", file), check=True)
    sides = {"commtrace report": commands.commtrace("report", long)} | commands.duckdb(str(file))
    taken: dict[str, list[commands.Taken]] = {name: [] for name in sides}
    for _ in range(options.pairs):
        for name, command in sides.items():
            taken[name].append(commands.measured(command))
    rows = []
    for name, runs in taken.items():
        rows.append(groups.shown(Row(case, name, "s", float(np.median([run.seconds for run in runs])))))
        rows.append(groups.shown(Row(f"{case}, memory", name, "MiB", max(run.mebibytes for run in runs))))
    return rows + of_page(long, case, options.pairs)


def of_page(log: Path, case: str, times: int) -> list[Row]:
    """Return the page's size and the time that a browser takes to open it; no rows without a browser."""
    chromium = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := which(name))), None)
    if chromium is None or find_spec("playwright") is None:
        return []
    file = log.with_suffix(".html")
    subprocess.run(commands.commtrace("report", log, "--html", file), check=True)
    command = [sys.executable, "-c", OPEN, chromium, file.as_uri(), str(times)]
    seconds = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    size = Row(f"{case}, size", "its page", "MB", file.stat().st_size / 1e6)
    return [groups.shown(Row(case, "its page, in Chromium", "s", float(np.median(seconds)))), groups.shown(size)]


# ---- the log ---------------------------------------------------------------------------------------------------------


def record(folder: Path) -> None:
    """Record steps with several operations, sizes and call sites."""
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


if __name__ == "__main__":
    main()
