"""CPU time, wall time and peak memory of the analyses across ranks and of the export to Perfetto.

The log is synthetic. Every rank has its own host, whose clock has an offset and a drift. Collectives of all ranks
alternate with those of groups of eight, every fourth call is asynchronous, and a step has 100 calls. Each command runs
in its own process.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import commands
import numpy as np
import results
from measuring import Row

from commtrace.schema import FORMAT, RECORD, VERSION, Clock, Flag, Phase, Records, State

RUN = "20261121-045421-3f9a1c"
RANKS, GROUP, STEP_CALLS = 64, 8, 100
CALL_NS = 1_000_000
UNIX_NS = 1_795_236_861_000_000_000
PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
WORLD, TENSOR = 1, 2
ALL_REDUCE, ALL_GATHER = 1, 2

ANALYSE = """
import importlib, sys
from commtrace.analyses.fold_engine import fold
from commtrace.run import open_run
fold(open_run(sys.argv[1]), [importlib.import_module("commtrace.analyses.across_ranks." + sys.argv[2]).ANALYSIS])
"""


def main() -> None:
    """Run the benchmark and write its results."""
    parser = results.parser(__doc__)
    parser.add_argument("--events", type=int, default=10_000_000, help="calls in the analysed log (%(default)s)")
    parser.add_argument("--fewer", type=int, default=1_000_000, help="the same for paths and export (%(default)s)")
    options = results.parsed(parser, events=20_000, fewer=10_000)
    results.write("across_ranks", rows(options), options)


def rows(options: argparse.Namespace) -> list[Row]:
    """Return the rows of all commands."""
    with tempfile.TemporaryDirectory() as folder:
        large, small, trace = (Path(folder, name) for name in ("large", "small", "run.pftrace"))
        write_log(large, options.events)
        write_log(small, options.fewer)
        analyse = [sys.executable, "-c", ANALYSE]
        cases = {
            f"matching and clocks of {options.events:,} calls": [*analyse, str(large), "clocks_section"],
            f"clocks and waits of {options.events:,} calls": [*analyse, str(large), "waits_section"],
            f"clocks, critical paths, delays of {options.fewer:,} calls": [*analyse, str(small), "step_time_section"],
        }
        if find_spec("perfetto") is not None:
            export = [sys.executable, "-m", "commtrace.cli", "export", str(small), "--out", str(trace)]
            cases[f"Perfetto trace of {options.fewer:,} calls"] = export
        measured = [row for case, command in cases.items() if options.only in case for row in measure(case, command)]
        if trace.exists():
            measured.append(Row([*cases][-1], "file", "MB", trace.stat().st_size / 1e6))
            results.show(measured[-1])
        return measured


def measure(case: str, command: list[str]) -> list[Row]:
    """Return a command's CPU time, wall time and peak memory."""
    taken = commands.measured(command)
    measured = [
        Row(case, "CPU time", "s", taken.processor),
        Row(case, "wall time", "s", taken.seconds),
        Row(case, "peak memory", "MiB", taken.mebibytes),
    ]
    for row in measured:
        results.show(row)
    return measured


# ---- the log ---------------------------------------------------------------------------------------------------------


def write_log(folder: Path, events: int) -> None:
    """Write a log of `events` calls."""
    for rank in range(RANKS):
        host = folder / RUN / f"node{rank:03d}"
        host.mkdir(parents=True)
        random = np.random.default_rng(rank)
        offset, rate = int(random.integers(1_000_000_000, 1_000_000_000_000)), random.uniform(-20e-6, 20e-6)
        np.save(host / f"rank{rank:05d}-{1000 + rank}.00000.npy", records(events // RANKS, offset, rate, random))
        lines = "".join(json.dumps(line) + "\n" for line in tables(rank, host.name, offset))
        (host / f"rank{rank:05d}-{1000 + rank}.jsonl").write_text(lines)


def records(count: int, offset: int, rate: float, random: np.random.Generator) -> Records:
    """Return the calls of a rank: call n begins in the first quarter of millisecond n, and ends after its middle."""
    number = np.arange(count)
    asynchronous = number % 4 == 0
    due = (number + 1) * CALL_NS
    begin = due + random.integers(0, CALL_NS // 4, count)
    end = due + CALL_NS // 2 + random.integers(0, CALL_NS // 100, count) + np.where(asynchronous, CALL_NS, 0)
    times = {
        "t_begin": begin,
        "t_return": np.where(asynchronous, begin + CALL_NS // 200, end),
        "t_wait": due + CALL_NS * 8 // 5,
        "t_end": end,
    }
    rows = np.zeros(count, RECORD)
    for name, moments in times.items():
        rows[name] = offset + moments + (moments * rate).astype(np.int64)
    rows["t_wait"][~asynchronous] = 0
    fields: dict[str, Any] = {
        "payload": 4096 << number % 8,
        "local": np.where(number % 2, 512 << number % 8, 0),
        "seq": number // 2,
        "group": np.where(number % 2, TENSOR, WORLD),
        "kind": np.where(number % 2, ALL_GATHER, ALL_REDUCE),
        "site": 1 + number % 3,
        "step": number // STEP_CALLS,
        "micro_batch": 0,
        "peer": -1,
        "tag": -1,
        "thread": 1,
        "phase": np.array(PHASES)[number % STEP_CALLS * len(PHASES) // STEP_CALLS],
        "clock": np.where(asynchronous, Clock.FUTURE, Clock.RETURN),
        "flags": np.where(asynchronous, Flag.ASYNC, 0),
        "state": State.COMPLETE,
    }
    for name, values in fields.items():
        rows[name] = values
    return rows


def tables(rank: int, host: str, offset: int) -> list[dict[str, Any]]:
    """Return the rows of a rank's tables."""
    first = rank // GROUP * GROUP
    torch = {"table": "kinds", "api": "torch", "dtype": "float32"}
    group = {"table": "groups", "desc": "", "index": 0, "backend": "gloo"}
    return [
        {
            "table": "process", "format": FORMAT, "version": VERSION, "run": RUN, "rank": rank, "world_size": RANKS,
            "host": host, "boot_id": host, "pid": 1000 + rank, "mono_ns": offset, "unix_ns": UNIX_NS,
            "recorder": "python", "blind_spots": [],
        },
        {**torch, "id": ALL_REDUCE, "op": "all_reduce", "variant": "allreduce_", "reduce_op": "sum"},
        {**torch, "id": ALL_GATHER, "op": "all_gather", "variant": "_allgather_base_", "reduce_op": None},
        *({"table": "sites", "id": id_, "file": "train.py", "line": id_, "function": "train"} for id_ in (1, 2, 3)),
        {**group, "id": WORLD, "ranks": f"0-{RANKS - 1}", "name": "0"},
        {**group, "id": TENSOR, "ranks": f"{first}-{first + GROUP - 1}", "name": str(1 + first // GROUP)},
        {"table": "end", "reason": "exit", "mono_ns": offset, "unix_ns": UNIX_NS},
    ]  # fmt: skip


if __name__ == "__main__":
    main()
