"""Long logs made from recorded ones: the last steps of a run, repeated over more steps and ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from commtrace.rank_ranges import format_rank_list
from commtrace.reading.process_reader import Process
from commtrace.run import open_run
from commtrace.schema import VERSION, Records

SEGMENT = 600_000  # records, as COMMTRACE_SEGMENT_MAX_BYTES allows
TIMES = ("t_begin", "t_return", "t_wait", "t_start", "t_end")
SIZES = ("data_parallel_size", "sequence_data_parallel_size", "world_size")


@dataclass(frozen=True)
class Repetition:
    """How to repeat a recorded run.

    Attributes:
        ranks: Number of ranks in the log; rank r does what rank r modulo the run's world size did.
        repeats: Number of repetitions of the last steps.
        period: Number of the last steps that are repeated.
        removed: Number of first repetitions without records in the log, as if COMMTRACE_MAX_BYTES had removed them.
        together: Whether groups of all ranks of the run become groups of all ranks of the log. Each rank's share in an
            all_gather and the size of every other call stay the same, as in data parallelism without ZeRO. Otherwise
            each set of ranks as large as the run has its own groups.
        per_host: Ranks per host; None: all ranks.
    """

    ranks: int
    repeats: int
    period: int = 1
    removed: int = 0
    together: bool = False
    per_host: int | None = None


def write_repeated(recorded: Path, folder: Path, repetition: Repetition) -> int:
    """Write a log and return its number of records."""
    run = open_run(recorded, recover=False)
    world = len(run.processes)
    recorded_of = [np.concatenate([*_blocks(process)]) for process in run.processes]
    span_ns = _span_ns(recorded_of, repetition.period)
    parts = [
        _repeated(process, records, span_ns, repetition)
        for process, records in zip(run.processes, recorded_of, strict=True)
    ]
    for rank in range(repetition.ranks):
        records, source = parts[rank % world][0], run.processes[rank % world]
        base = 0 if repetition.together else rank - rank % world
        if base:
            records = records.copy()
            records["peer"] += np.where(records["peer"] >= 0, base, 0)
        number = 0 if repetition.per_host is None else rank // repetition.per_host
        host = folder / run.id / f"node{number:04d}"
        host.mkdir(parents=True, exist_ok=True)
        stem = f"rank{rank:05d}-{1000 + rank}"
        for segment, begin in enumerate(range(0, len(records), SEGMENT)):
            np.save(host / f"{stem}.{segment:05d}.npy", records[begin : begin + SEGMENT])
        lines = _lines(source, rank, host.name, parts[rank % world], base, repetition)
        (host / f"{stem}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return sum(len(parts[rank % world][0]) for rank in range(repetition.ranks))


def _blocks(process: Process) -> Iterator[Records]:
    return (block for segment in process.segments for block in segment.blocks())


def _span_ns(recorded_of: list[Records], period: int) -> int:
    """Return the duration of the last steps over all processes, so that repeated calls still match across ranks."""
    last = [records[records["step"] > records["step"].max() - period] for records in recorded_of]
    begin = min(int(records["t_begin"].min()) for records in last)
    return max(int(records[name].max()) for records in last for name in TIMES) - begin + 1


def _repeated(process: Process, records: Records, span: int, repetition: Repetition) -> tuple[Records, int, int]:
    """Return a process's records, the number of its removed records, and the ns by which its end is later."""
    if repetition.together:
        gathers = [number for number, kind in process.tables.kinds.items() if kind.op == "all_gather"]
        records["payload"][np.isin(records["kind"], gathers)] *= repetition.ranks // int(
            process.tables.process["world_size"]
        )
    steps = records["step"]
    last = records[steps > steps.max() - repetition.period]
    numbers = np.repeat(np.arange(repetition.removed, repetition.repeats), len(last))
    later = last[np.tile(np.arange(len(last)), repetition.repeats - repetition.removed)]
    later["step"] += (numbers * repetition.period).astype(later["step"].dtype)
    for name in TIMES:
        later[name] += np.where(later[name] > 0, numbers * span, 0)
    later["seq"] += np.tile(_calls_of_channels(last), repetition.repeats - repetition.removed) * numbers.astype("u4")
    before = records[steps <= steps.max() - repetition.period]
    removed = repetition.removed * len(last) + (len(before) if repetition.removed else 0)
    kept = later if repetition.removed else np.concatenate([before, later])
    return kept, removed, span * (repetition.repeats - 1)


def _calls_of_channels(records: Records) -> Any:
    """Return the number of calls in each record's channel, by which `seq` grows from one repetition to the next."""
    messages = records["tag"] >= 0
    key = np.stack([records["group"], *(np.where(messages, records[name], -1) for name in ("peer", "tag", "kind"))])
    _, groups, counts = np.unique(key, axis=1, return_inverse=True, return_counts=True)
    return counts[groups.ravel()].astype("u4")


def _lines(
    source: Process, rank: int, host: str, repeated: tuple[Records, int, int], base: int, repetition: Repetition
) -> Iterator[dict[str, Any]]:
    """Yield the lines of the tables of a rank."""
    records, removed, later_ns = repeated
    world = int(source.tables.process["world_size"])
    for line in map(json.loads, source.path.read_text().splitlines()):
        table = line["table"]
        if table == "process":
            line["version"] = VERSION  # the recorded log may have an earlier version
            line |= {"rank": rank, "world_size": repetition.ranks, "host": host, "pid": 1000 + rank, "boot_id": host}
        elif table == "groups":
            members = source.tables.groups[line["id"]].ranks
            is_world = repetition.together and len(members) == world
            line["ranks"] = format_rank_list(range(repetition.ranks) if is_world else [base + m for m in members])
        elif table == "job" and repetition.together:
            line |= {name: repetition.ranks for name in SIZES if line.get(name) == world}
        elif table == "stats":
            line |= {"calls": len(records) + removed, "removed": removed}
        if table in ("stats", "end", "clock"):
            line |= {name: line[name] + later_ns for name in ("mono_ns", "unix_ns") if name in line}
        yield line
