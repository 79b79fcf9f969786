"""What commands take that read a log of many ranks, or of many steps: seconds, and memory of all their processes.

Beside them DuckDB, which groups the same events, from the packed log, by what the report's tables are keyed by. The
logs are recorded ones of two ranks (tests/support/recorded), whose last step is repeated.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
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
SELECTED = """
import sys, commtrace
first = int(sys.argv[2])
events = commtrace.open(sys.argv[1]).events(ranks=[0], steps=range(first, first + 10))
assert len(events), "no such events"
"""


def cases(events: int, ranks: int) -> dict[str, tuple[str, Repetition]]:
    """The recorded log, and what is made of it, for so many events."""
    of_many, of_two = events // ranks, events // 2
    some = of_two // CALLS["ddp"] // 10
    return {
        f"{ranks:,} ranks, DDP": ("ddp", Repetition(ranks, of_many // CALLS["ddp"], together=True, per_host=PER_HOST)),
        f"{ranks:,} ranks, ZeRO-3 in pairs": (
            "zero3", Repetition(ranks, of_many // CALLS["zero3"], per_host=PER_HOST)
        ),
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
    parser.add_argument("--ranks", type=int, default=RANKS, help="of the logs of many ranks (%(default)s)")
    options = results.parsed(parser, events=80_000, ranks=100)
    results.write("scale", [*rows(options)], options)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Rows for each log."""
    for name, (scheme, repetition) in cases(options.events, options.ranks).items():
        if options.only in name:
            with tempfile.TemporaryDirectory() as folder:
                with zipfile.ZipFile(RECORDED) as archive:
                    archive.extractall(folder)
                log = Path(folder) / "log"
                events = write_repeated(Path(folder) / scheme, log, repetition)
                steps = repetition.repeats - repetition.removed
                case = f"{name}, {steps:,} steps: {events:,} events"
                yield from of_log(log, case, repetition.removed + steps // 2, options.pairs)


def of_log(log: Path, case: str, step: int, times: int) -> Iterator[Row]:
    """What each command takes; and to read ten steps from some step on."""
    packed, table = log.with_suffix(".packed"), log.with_suffix(".parquet")
    yield from taken(case, "pack", commands.commtrace("pack", log, "--out", packed, "--force"), times)
    yield from taken(case, "export", commands.commtrace("export", log, "--out", table, "--force"), times)
    table.unlink()
    for name in ("report", "check"):
        yield from taken(case, name, commands.commtrace(name, log), times)
    yield from taken(
        case, "events of ten steps of a rank", [sys.executable, "-c", SELECTED, str(log), str(step)], times
    )
    shutil.rmtree(log)
    yield from taken(case, "report of the packed log", commands.commtrace("report", packed), times)
    for name, command in commands.duckdb(f"{packed}/**/*.parquet").items():
        yield from taken(case, name, command, times)


def taken(case: str, name: str, command: list[str], times: int) -> Iterator[Row]:
    """The median of its seconds and of its processor's, and the most memory."""
    all_taken = [commands.measured(command, NOT_COMPARED) for _ in range(times)]
    for row in (
        Row(case, name, "s", float(np.median([one.seconds for one in all_taken]))),
        Row(case, f"{name}, processor", "s", float(np.median([one.processor for one in all_taken]))),
        Row(case, f"{name}, memory", "MiB", max(one.mebibytes for one in all_taken)),
    ):
        results.show(row)
        yield row


if __name__ == "__main__":
    main()
