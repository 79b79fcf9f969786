"""What a report over a long log takes: seconds from the command to its end, and memory of all its processes.

Beside it DuckDB, which groups the events of the same run, exported to Parquet beforehand, by what the report's tables
are keyed by. Of the page: megabytes, and seconds until Chromium, already running, has drawn its last figure. The log is
one of a few real steps on a fake process group, whose last one is repeated.
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
    """Measure."""
    parser = results.parser(__doc__, pairs=3)
    parser.add_argument("--events", type=int, nargs="+", default=[1_000_000, 20_000_000], help="of each log")
    options = results.parsed(parser, events=[100_000])
    results.write("report", groups.run(reports, options, backend="fake"), options)


def reports(options: argparse.Namespace) -> list[Row]:
    """Rows for each length of log."""
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder, "small")
        record(small)
        return [row for events in options.events for row in of_log(small, Path(folder, str(events)), events, options)]


def of_log(small: Path, long: Path, events: int, options: argparse.Namespace) -> list[Row]:
    """The report's, and DuckDB's, of a log of so many events."""
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
    subprocess.run(commands.commtrace("report", log, "--html", file), check=True)
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


if __name__ == "__main__":
    main()
