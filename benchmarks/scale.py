"""What commands take that read a log of many ranks, or of many steps: processor time and memory of all their processes.

Beside them DuckDB, which groups the events of the same run, exported to Parquet beforehand, by what the report's tables
are keyed by. The logs are recorded ones of two ranks (tests/support/recorded), whose last step is repeated.
"""

from __future__ import annotations

import argparse
import tempfile
import zipfile
from pathlib import Path

import commands
import numpy as np
import results
from measuring import Row
from repeated_logs import Repetition, write_repeated

RECORDED = Path(__file__).parents[1] / "tests" / "support" / "recorded" / "logs.zip"
EVENTS = 2_000_000
CALLS = {"ddp": 3, "zero3": 28}  # of a rank's step
RANKS, PER_HOST = 1000, 8
REMOVED = 500_000
NOT_COMPARED = 3  # status of check: of a log without records of its first steps


def cases(events: int) -> dict[str, tuple[str, Repetition]]:
    """The recorded log, and what is made of it, for so many events."""
    of_many, of_two = events // RANKS, events // 2
    some = of_two // CALLS["ddp"] // 10
    return {
        f"{RANKS:,} ranks, DDP": ("ddp", Repetition(RANKS, of_many // CALLS["ddp"], together=True, per_host=PER_HOST)),
        "2 ranks, DDP": ("ddp", Repetition(2, of_two // CALLS["ddp"])),
        "2 ranks, ZeRO-3": ("zero3", Repetition(2, of_two // CALLS["zero3"])),
        f"2 ranks, DDP, {REMOVED:,} earlier steps removed": (
            "ddp", Repetition(2, REMOVED + some, removed=REMOVED),
        ),
    }  # fmt: skip


def main() -> None:
    """Measure."""
    parser = results.parser(__doc__, pairs=3)
    parser.add_argument("--events", type=int, default=EVENTS, help="of each log (%(default)s)")
    options = results.parsed(parser, events=80_000)
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(RECORDED) as archive:
            archive.extractall(folder)
        results.write("scale", rows(Path(folder), options), options)


def rows(folder: Path, options: argparse.Namespace) -> list[Row]:
    """Rows for each log."""
    found = []
    for number, (name, (scheme, repetition)) in enumerate(cases(options.events).items()):
        if options.only in name:
            log = folder / f"log{number}"
            events = write_repeated(folder / scheme, log, repetition)
            steps = repetition.repeats - repetition.removed
            found += of_log(log, f"{name}, {steps:,} steps: {events:,} events", options.pairs)
    return found


def of_log(log: Path, case: str, times: int) -> list[Row]:
    """What each command takes."""
    sides = {f"commtrace {name}": commands.commtrace(name, log) for name in ("report", "check")} | commands.duckdb(log)
    found = []
    for name, command in sides.items():
        taken = [commands.measured(command, NOT_COMPARED) for _ in range(times)]
        found.append(Row(case, name, "s", float(np.median([one.processor for one in taken]))))
        found.append(Row(case, f"{name}, memory", "MiB", max(one.mebibytes for one in taken)))
        for row in found[-2:]:
            results.show(row)
    return found


if __name__ == "__main__":
    main()
