"""Executors: which one reads a log, and that its results are the same."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import damaged_logs
import pytest
from factory import training
from packed_logs import results
from pandas.testing import assert_frame_equal

from commtrace.errors import CommtraceError
from commtrace.reading import executors
from commtrace.reading.executors import as_executor
from commtrace.reading.run_parts import RunPart
from commtrace.run import open_run


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make every log a large one of many parts. Returns the number of worker processes of each pool that is started."""
    started: list[int] = []

    class Pool(futures.ProcessPoolExecutor):
        def __init__(self, workers: int, context: Any) -> None:
            started.append(workers)
            super().__init__(workers, context)

    monkeypatch.setattr(futures, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(executors, "_process_context", lambda: multiprocessing.get_context("fork"))
    monkeypatch.setattr(executors, "MIN_PARALLEL_RECORDS", 1)
    monkeypatch.setattr(executors, "usable_cores", lambda: 2)
    monkeypatch.setattr("commtrace.reading.recorded_run.RECORDS_PER_TASK", 1)
    monkeypatch.setattr("commtrace.reading.pack.PART_ROWS", 1)
    return started


COMMANDS: Sequence[tuple[str, ...]] = (
    ("report", "LOG", "--json"),
    ("report", "LOG", "LOG", "--json"),
    ("check", "LOG"),
    ("check", "LOG", "--against", "LOG"),
    ("diff", "LOG", "LOG", "--json"),
    ("scaling", "LOG", "--json"),
    ("pack", "LOG", "--out", "packed", "--force"),
)


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_worker_processes_give_equal_results(
    command: Sequence[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    pools: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damaged_logs.unpack(tmp_path)  # they have a job, without which the rules read no records
    monkeypatch.chdir(tmp_path)
    words = ["zero1" if word == "LOG" else word for word in command]
    parallel = results(words, capsys, tmp_path / "zero1")
    assert pools
    assert {*pools} == {2}
    pools.clear()
    monkeypatch.setattr(executors, "MIN_PARALLEL_RECORDS", 10**9)
    assert results(words, capsys, tmp_path / "zero1") == parallel
    assert pools == []


def test_a_run_in_a_notebook_uses_worker_processes(tmp_path: Path, pools: list[int]) -> None:
    training(tmp_path, ranks=3)
    tables = open_run(tmp_path).tables()
    assert pools
    with futures.ThreadPoolExecutor(1) as threads:
        for name, table in open_run(tmp_path).tables(threads).items():
            assert_frame_equal(tables[name], table, check_exact=True)


def end(part: RunPart) -> Iterator[None]:
    os._exit(9)


def test_a_worker_that_is_killed_is_an_error(tmp_path: Path, pools: list[int]) -> None:
    training(tmp_path, ranks=3)
    run = open_run(tmp_path)
    with pytest.raises(CommtraceError, match=f"{tmp_path}.*: a worker process was killed, probably because memory"):
        list(as_executor(None).map("test", end, run.parts()))
    assert pools == [2]


def test_a_script_with_threads_starts_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked process would have the locks of other threads; a spawned one would run the script again."""
    main: Any = type("Main", (), {})
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    assert executors._process_context() == multiprocessing.get_context("fork")
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert executors._process_context() == multiprocessing.get_context("spawn")
    main.__file__ = "script.py"
    assert executors._process_context() is None
