"""Logs on disk, written as docs/reference/log-format.md describes them and without the recorder.

log = LogFactory(tmp_path)
log.process(rank=0).write([record(payload=1024, step=0)])
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from commtrace.schema import FORMAT, RECORD, VERSION, Clock, Phase, State

Records = npt.NDArray[np.void]

RUN = "20261121-045421-3f9a1c"
UNIX_NS = 1_795_236_861_000_000_000

ALL_REDUCE, ALL_GATHER, SEND, RECV, BARRIER, REDUCE_SCATTER = 1, 2, 3, 4, 5, 6
WORLD, PAIR, ALONE = 1, 2, 3

KINDS: Sequence[dict[str, Any]] = (
    {"id": 1, "op": "all_reduce", "variant": "allreduce_", "api": "torch", "dtype": "float32", "reduce_op": "sum"},
    {"id": 2, "op": "all_gather", "variant": "_allgather_base_", "api": "torch", "dtype": "float16", "reduce_op": None},
    {"id": 3, "op": "send", "variant": "send", "api": "torch", "dtype": "float16", "reduce_op": None},
    {"id": 4, "op": "recv", "variant": "recv_", "api": "torch", "dtype": "float16", "reduce_op": None},
    {"id": 5, "op": "barrier", "variant": "barrier", "api": "torch", "dtype": "uint8", "reduce_op": None},
    {
        "id": 6,
        "op": "reduce_scatter",
        "variant": "_reduce_scatter_base_",
        "api": "torch",
        "dtype": "float16",
        "reduce_op": "sum",
    },
)
SITES: Sequence[dict[str, Any]] = (
    {
        "id": 1,
        "file": "/opt/venv/lib/python3.11/site-packages/deepspeed/runtime/engine.py",
        "line": 2711,
        "function": "allreduce_bucket",
    },
    {"id": 2, "file": "/home/user/project/train.py", "line": 40, "function": "main"},
    {
        "id": 3,
        "file": "/opt/lib/site-packages/deepspeed/runtime/zero/partition_parameters_with_a_long_name.py",
        "line": 1300,
        "function": "_all_gather_params_of_one_coordinator",
    },
)


def record(**fields: int) -> Records:
    """Return one record, shape (1,). Default: a float32 all_reduce of 1 KiB over the world, in backward, waited for."""
    row = np.zeros(1, RECORD)
    known = {
        "t_begin": 1_000,
        "t_return": 3_000,
        "t_wait": 4_000,
        "t_end": 9_000,
        "payload": 1024,
        "group": WORLD,
        "site": 1,
    }
    codes = {"kind": ALL_REDUCE, "thread": 1, "phase": Phase.BACKWARD, "clock": Clock.WAIT, "state": State.COMPLETE}
    none = {"step": 0, "micro_batch": 0, "peer": -1, "tag": -1}
    for name, value in {**known, **codes, **none, **fields}.items():
        row[name] = value
    return row


def records(rows: Iterable[Records]) -> Records:
    """Return the records as one array."""
    return np.concatenate([np.zeros(0, RECORD), *rows])


def open_segment(rows: Records) -> bytes:
    """Return a segment that is being written: a header of 1,024 bytes with shape (0,), then the records."""
    text = repr({"descr": RECORD.descr, "fortran_order": False, "shape": (0,)})
    return b"\x93NUMPY\x01\x00" + (1014).to_bytes(2, "little") + text.ljust(1013).encode() + b"\n" + rows.tobytes()


class ProcessFactory:
    """The files of one process."""

    def __init__(self, folder: Path, rank: int, pid: int, **process: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rank, self.stem = folder, rank, f"rank{rank:05d}-{pid}"
        self.tables = folder / f"{self.stem}.jsonl"
        self.segments: list[Path] = []
        self.calls = 0
        self.version = process.get("version", VERSION)
        facts = {
            "format": FORMAT,
            "version": VERSION,
            "run": RUN,
            "rank": rank,
            "world_size": 2,
            "host": folder.name,
            "pid": pid,
        }
        moments = {"mono_ns": 1_000, "unix_ns": UNIX_NS}
        blind = ["collectives that C++ code starts on a backend of its own are not seen"]
        self.add("process", **{**facts, **moments, "recorder": "python", "blind_spots": blind, **process})

    def add(self, table: str, **row: Any) -> ProcessFactory:
        """Append a row to a table. Lists of ranks become text, as in version 2 of the format."""
        if self.version > 1 and isinstance(row.get("ranks"), Sequence) and not isinstance(row["ranks"], str):
            row["ranks"] = ",".join(map(str, row["ranks"]))
        with open(self.tables, "a") as file:
            file.write(json.dumps({"table": table, **row}) + "\n")
        return self

    def known(
        self, groups: dict[int, Sequence[int]] | None = None, roles: dict[int, str] | None = None, backend: str = "gloo"
    ) -> ProcessFactory:
        """Add KINDS, SITES, groups by number (default: WORLD of ranks 0 and 1, ALONE), and roles by group number."""
        for table, rows in (("kinds", KINDS), ("sites", SITES)):
            for row in rows:
                self.add(table, **row)
        for number, ranks in (groups or {WORLD: [0, 1], ALONE: [self.rank]}).items():
            self.add("groups", id=number, ranks=ranks, name=str(number), desc="", index=0, backend=backend)
        for number, role in (roles or {}).items():
            self.add("roles", group=number, role=role, source="test")
        return self

    def write(
        self, rows: Iterable[Records] | Records, *, open_: bool = False, number: int | str | None = None
    ) -> ProcessFactory:
        """Append a segment."""
        data = rows if isinstance(rows, np.ndarray) else records(rows)
        part = f"{len(self.segments):05d}" if number is None else number if isinstance(number, str) else f"{number:05d}"
        path = self.folder / f"{self.stem}.{part}.npy{'.open' if open_ else ''}"
        if open_:
            path.write_bytes(open_segment(data))
        else:
            np.save(path, data)
        self.segments.append(path)
        self.calls += len(data)
        return self

    def stats(self, **row: Any) -> ProcessFactory:
        """Add counters, by default those of the written records."""
        counts = {
            "calls": self.calls,
            "dropped": 0,
            "removed": 0,
            "lost": 0,
            "unrecorded": 0,
            "hook_errors": 0,
            "first_error": None,
            "write_errors": 0,
        }
        cost = {
            "cost_samples": 100,
            "cost_ns": 800_000,
            "cost_p99_ns": 21_000,
            "drain_cpu_ns": 5_000_000,
            "mono_ns": 10_000_001_000,
        }
        return self.add("stats", **{**counts, **cost, **row})

    def end(self, reason: str = "exit") -> ProcessFactory:
        """Add counters and the row `end`."""
        return self.stats().add("end", mono_ns=10_000_001_000, unix_ns=UNIX_NS + 10_000_000_000, reason=reason)


class LogFactory:
    """A log directory, as the variable COMMTRACE names it."""

    def __init__(self, directory: Path, run: str = RUN) -> None:
        self.directory, self.run = directory, run
        directory.mkdir(parents=True, exist_ok=True)

    def process(self, rank: int = 0, *, pid: int = 4711, host: str = "node17", **process: Any) -> ProcessFactory:
        """Return a process whose only row is `process`."""
        return ProcessFactory(self.directory / self.run / host, rank, pid, **{"run": self.run, **process})


def training(directory: Path, *, ranks: int = 2, steps: int = 3, run: str = RUN, **process: Any) -> LogFactory:
    """Write a small data-parallel run: a barrier before the first step, an all_reduce and an all_gather per step."""
    log = LogFactory(directory, run)
    for rank in range(ranks):
        files = log.process(rank, pid=4711 + rank, world_size=ranks, **process)
        files.known({WORLD: list(range(ranks)), ALONE: [rank]}, {WORLD: "data"})
        rows = [record(kind=BARRIER, payload=0, step=-1, micro_batch=-1, phase=Phase.INIT, site=2)]
        for step in range(steps):
            begin = (step + 1) * 1_000_000
            times = {"t_begin": begin, "t_return": begin + 2_000, "t_wait": begin + 5_000, "t_end": begin + 50_000}
            rows.append(record(payload=4096, seq=1 + 2 * step, step=step, **times))
            rows.append(
                record(
                    kind=ALL_GATHER,
                    payload=2048,
                    local=2048 // ranks,
                    seq=2 + 2 * step,
                    step=step,
                    phase=Phase.OPTIMIZER,
                    site=3,
                    **times,
                )
            )
        files.write(rows).end()
    return log


def overlapping_training(folder: Path, steps: int, waits_after: int) -> None:
    """Write steps of 1 ms of two ranks: an all_reduce is in flight for 400 us, and waited for after `waits_after` us.

    The call itself takes 10 us; with 0, it returns when the operation has ended.
    """
    log = LogFactory(folder)
    for rank in range(2):
        rows = []
        for step in range(steps):
            begin = 10**9 + step * 1_000_000
            times = {"t_begin": begin, "t_return": begin + 400_000, "t_wait": 0, "t_end": begin + 400_000}
            if waits_after:
                times |= {"t_return": begin + 10_000, "t_wait": begin + waits_after * 1000}
            clock = Clock.FUTURE if waits_after else Clock.RETURN
            rows.append(record(seq=step, step=step, clock=clock, **times))
        process = log.process(rank, pid=100 + rank, world_size=2).known({WORLD: [0, 1]}, {WORLD: "data"})
        process.write(rows).stats().add("end", mono_ns=10**9 + steps * 1_000_000, unix_ns=1, reason="exit", status=0)
