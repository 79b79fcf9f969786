"""Who ended first, computed by hand from logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from factory import UNIX_NS, WORLD, LogFactory, record

from commtrace.analyses.across_ranks.endings import find_endings
from commtrace.analyses.across_ranks.endings_section import describe_endings
from commtrace.cli import main
from commtrace.run import open_run

RANKS = 3
SECOND = 10**9


def exception(kind: str, line: int = 7) -> dict[str, Any]:
    return {"type": kind, "message": "bad", "lines": [{"file": "/p/train.py", "line": line, "function": "f"}], "at": 0}


def log(directory: Path, **of_rank: list[tuple[str, dict[str, Any]]]) -> Path:
    """Write a log; `r0`, `r1` ... are the last rows of each rank, with seconds in place of monotonic ns."""
    factory = LogFactory(directory)
    for rank in range(RANKS):
        process = factory.process(rank, pid=10 + rank, world_size=RANKS).known({WORLD: [*range(RANKS)]})
        process.write([record(step=step) for step in range(3)])
        for table, row in of_rank[f"r{rank}"]:
            moment = int(row["at"] * SECOND)
            process.add(table, **{**row, "mono_ns": moment, "unix_ns": UNIX_NS + moment})
    return directory


def left(at: float, kind: str = "", line: int = 7) -> list[tuple[str, dict[str, Any]]]:
    """Return the rows of a process that left its program at a time, by an exception if `kind` is given."""
    facts = exception(kind, line) if kind else None
    return [
        ("leaving", {"at": at, "step": 2, "status": None, "exception": facts}),
        ("end", {"at": at + 0.1, "reason": "exit"}),
    ]


def died(at: float) -> list[tuple[str, dict[str, Any]]]:
    """Return the rows of a process that was last seen alive at a time."""
    return [("stats", {"at": at, "calls": 3}), ("salvage", {"at": at, "records": 0, "host": "node17"})]


def saw(at: float, rank: int, status: int | None) -> tuple[str, dict[str, Any]]:
    return "peer_ends", {"at": at, "stem": "s", "rank": rank, "pid": 10 + rank, "status": status, "oom_ns": None}


def endings(directory: Path) -> pd.DataFrame:
    return find_endings(open_run(directory))["endings"]


CASES: dict[str, tuple[dict[str, list[tuple[str, dict[str, Any]]]], list[str], list[str | None]]] = {
    "regular": ({f"r{rank}": left(5 + rank) for rank in range(3)}, [], []),
    "exception": (
        {"r0": left(6, "OSError"), "r1": left(5, "MemoryError", 9), "r2": left(7, "OSError")},
        ["exception", "exception", "exception"], ["later", "first", "later"],
    ),
    "everywhere": ({f"r{rank}": left(5 + rank, "TypeError") for rank in range(3)}, ["exception"] * 3, ["first"] * 3),
    "killed, seen": (
        {"r0": [saw(5, 1, 9), *left(6, "OSError")], "r1": died(4.9), "r2": left(7, "OSError")},
        ["exception", "signal", "exception"], ["later", "first", "later"],
    ),
    "killed, seen late": (
        {"r0": [saw(6.5, 1, 9), *left(7, "OSError")], "r1": died(4.9), "r2": left(6, "OSError", 8)},
        ["exception", "signal", "exception"], [None, None, None],
    ),
    "killed, not seen": (
        {"r0": left(6, "OSError"), "r1": died(4.9), "r2": left(7, "OSError")},
        ["exception", "died", "exception"], [None, None, None],
    ),
    "killed afterwards": (
        {"r0": left(4, "OSError"), "r1": died(4.9), "r2": died(4.8)},
        ["exception", "died", "died"], ["first", "later", "later"],
    ),
    "os._exit": (
        {"r0": [saw(5, 1, 4 << 8), *left(6, "OSError")], "r1": died(4.9), "r2": left(7)},
        ["exception", "status", "exit"], ["later", "first", "later"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_who_ended_first(case: str, tmp_path: Path) -> None:
    rows, ends, order = CASES[case]
    table = endings(log(tmp_path, **rows))
    assert [*table["end"]] == ends
    assert [value if isinstance(value, str) else None for value in table["order"]] == order


def test_the_exit_status_follows_the_tables(tmp_path: Path) -> None:
    directory = log(tmp_path, r0=left(5), r1=left(4), r2=left(6))
    path = next(directory.rglob("rank00001-*.jsonl"))
    path.write_bytes(path.read_bytes() + bytes([3]))
    table = endings(directory)
    assert [*table["end"]] == ["exit", "status", "exit"]
    assert [*table["order"]] == ["later", "first", "later"]
    assert [*table["after_ns"]] == [SECOND, 0, 2 * SECOND]
    assert not open_run(directory).notes


def test_a_step_that_was_cut_off_is_not_typical_and_the_check_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = log(tmp_path, r0=left(6, "OSError"), r1=left(5, "MemoryError"), r2=left(7, "OSError"))
    assert open_run(directory).table("steady_step")["steps"].iloc[0] == 2  # of 3
    assert main(["check", str(directory)]) == 5
    first = next(describe_endings(find_endings(open_run(directory))))
    assert first == 'Rank 1 ended first, by MemoryError at p/train.py:7 f ("bad") in step 2.'
    assert capsys.readouterr().out.startswith("Rank 1 ended first, by MemoryError")
