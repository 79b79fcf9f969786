"""Time of commands that read a log of many ranks or many steps, and memory of all their processes.

For comparison, DuckDB groups the same events, from the packed log, by the keys of the report's tables. These tables
alone, and DuckDB again, are also measured without the start of Python and of their libraries. The logs are recorded
ones of two ranks, with the last step repeated.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import commands
import numpy as np
import results
from measuring import Row
from repeated_logs import Repetition, write_repeated

from commtrace.run import open_run

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "tests" / "support" / "recorded" / "logs.zip"
LAYERS = {"ZeRO-3 of 5 layers": 5, "ZeRO-3 of 44 layers": 44}
"""Logs that this benchmark records -> number of layers of examples/gpt_neox, on two ranks."""

EVENTS = 2_000_000
RANKS, PER_HOST = 1000, 8
REMOVED = 500_000
NOT_COMPARED = 3  # status of `check` for a log without the records of its first steps
SELECTED = """
import sys, commtrace
first = int(sys.argv[2])
events = commtrace.open(sys.argv[1]).events(ranks=[0], steps=range(first, first + 10))
assert len(events), "no such events"
"""


class Case(NamedTuple):
    """A log made by repeating a recorded one."""

    name: str
    recorded: str
    ranks: int
    events: int
    together: bool = False
    removed: int = 0

    def repetition(self, calls: int) -> Repetition:
        """Return how to repeat a run whose ranks make `calls` calls in their last step."""
        repeats = self.removed + max(2, self.events // self.ranks // calls)
        per_host = PER_HOST if self.ranks > 2 else None
        return Repetition(self.ranks, repeats, removed=self.removed, together=self.together, per_host=per_host)


def cases(events: int, ranks: int) -> Iterator[Case]:
    """Yield logs of `events` events, of `ranks` ranks or of two."""
    yield Case(f"{ranks:,} ranks, DDP", "ddp", ranks, events, together=True)
    yield Case(f"{ranks:,} ranks, ZeRO-3 in pairs", "zero3", ranks, events)
    yield Case("2 ranks, DDP", "ddp", 2, events)
    yield Case("2 ranks, ZeRO-3", "zero3", 2, events)
    for name in LAYERS:
        yield Case(f"2 ranks, {name}", name, 2, events)
    yield Case(f"2 ranks, DDP, {REMOVED:,} earlier steps removed", "ddp", 2, events // 10, removed=REMOVED)


def main() -> None:
    """Run the benchmark and write its results."""
    parser = results.parser(__doc__, pairs=3)
    parser.add_argument("--events", type=int, default=EVENTS, help="events in each log (%(default)s)")
    parser.add_argument("--ranks", type=int, default=RANKS, help="ranks of the logs of many ranks (%(default)s)")
    options = results.parsed(parser, events=80_000, ranks=100)
    results.write("scale", [*rows(cases(options.events, options.ranks), options.only, options.pairs)], options)


def rows(cases: Iterable[Case], only: str, times: int) -> Iterator[Row]:
    """Yield rows for each log with `only` in its name; each command runs `times` times."""
    for case in cases:
        if only in case.name:
            with tempfile.TemporaryDirectory() as folder:
                recorded, log = recording(case.recorded, Path(folder)), Path(folder) / "log"
                last = open_run(recorded).events(ranks=[0])["step"].to_numpy()
                repetition = case.repetition(int((last == last.max()).sum()))
                events = write_repeated(recorded, log, repetition)
                steps = repetition.repeats - repetition.removed
                name = f"{case.name}, {steps:,} steps: {events:,} calls"
                yield from of_log(log, name, repetition.removed + steps // 2, times)


def recording(name: str, folder: Path) -> Path:
    """Return a log of two ranks, unpacked or recorded now."""
    if name not in LAYERS:
        with zipfile.ZipFile(RECORDED) as archive:
            archive.extractall(folder)
        return folder / name
    (config := folder / "config.yml").write_text(json.dumps({"num_layers": LAYERS[name]}))
    train = ["-m", "examples.gpt_neox.train", "tiny", str(config), "--train-iters", "4", "--zero-stage", "3"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *train]
    variables = {**os.environ, "COMMTRACE": str(folder / "recorded"), "OMP_NUM_THREADS": "1"}
    subprocess.run(launch, check=True, cwd=ROOT, env=variables, timeout=300, capture_output=True)
    return folder / "recorded"


def of_log(log: Path, case: str, step: int, times: int) -> Iterator[Row]:
    """Yield the rows of each command, and of reading ten steps from `step` on."""
    packed, table = log.with_suffix(".packed"), log.with_suffix(".parquet")
    yield from taken(case, "pack", commands.commtrace("pack", log, "--out", packed, "--force"), times)
    yield from taken(case, "export", commands.commtrace("export", log, "--out", table, "--force"), times)
    table.unlink()
    for name in ("report", "check"):
        yield from taken(case, name, commands.commtrace(name, log), times)
    yield from taken(case, "calls of ten steps of a rank", [sys.executable, "-c", SELECTED, str(log), str(step)], times)
    shutil.rmtree(log)
    yield from taken(case, "report of the packed log", commands.commtrace("report", packed), times)
    duckdb = commands.duckdb(f"{packed}/**/*.parquet")
    for name, command in duckdb.items():
        yield from taken(case, name, command, times)
    for name, command in {**commands.groupings(packed), **duckdb}.items():
        seconds = float(np.median([commands.measured_inside(command) for _ in range(times)]))
        results.show(row := Row(case, f"{name}, without start", "s", seconds))
        yield row


def taken(case: str, name: str, command: list[str], times: int) -> Iterator[Row]:
    """Yield a command's median wall time, median CPU time and peak memory."""
    runs = [commands.measured(command, NOT_COMPARED) for _ in range(times)]
    for row in (
        Row(case, name, "s", float(np.median([run.seconds for run in runs]))),
        Row(case, f"{name}, processor", "s", float(np.median([run.processor for run in runs]))),
        Row(case, f"{name}, memory", "MiB", max(run.mebibytes for run in runs)),
    ):
        results.show(row)
        yield row


if __name__ == "__main__":
    main()
