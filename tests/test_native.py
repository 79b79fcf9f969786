"""The native recorder under many threads and at any end of a program. (Its records: with those of the portable one.)"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import processes
import recorders

from commtrace.schema import State

FOLDER = Path(__file__).with_name("native_programs")
COMPILER = shutil.which("g++")


def ranks(program: str, *arguments: str, recorder: str, directory: Path, **variables: Any) -> list[processes.Left]:
    """The logs of two ranks of a program."""
    recorders.needs(recorder)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    command = [*launcher, str(processes.free_port()), str(FOLDER / f"{program}.py"), *arguments]
    variables = {"COMMTRACE": directory, "COMMTRACE_RECORDER": recorder, "PYTHONFAULTHANDLER": 1, **variables}
    result = processes.run(command, limit=150, **variables)
    assert result.status == 0, result.err[-6000:]
    return processes.read_all(directory)


def assert_accounted(lefts: list[processes.Left]) -> None:
    assert lefts
    for left in lefts:
        stats = left.stats
        assert stats["hook_errors"] == 0, stats["first_error"]
        assert stats["calls"] == len(left.records) + stats["dropped"]


@pytest.mark.parametrize("ending", ["plain", "fork", "in flight"])
def test_many_threads_and_an_unfriendly_end(ending: str, tmp_path: Path) -> None:
    settings = {"COMMTRACE_RING_RECORDS": 64, "COMMTRACE_DRAIN_MS": 2}
    lefts = ranks("stress", ending, recorder="native", directory=tmp_path / "log", **settings)
    assert len(lefts) == 2
    assert_accounted(lefts)
    assert all(left.ended for left in lefts)


def test_stop_and_start_while_threads_communicate(tmp_path: Path) -> None:
    second = tmp_path / "second"
    lefts = ranks("stress", "restart", recorder="native", directory=tmp_path / "log", STRESS_SECOND_LOG=second)
    assert_accounted([*lefts, *processes.read_all(second)])


def test_a_process_that_leaves_without_a_word_is_salvaged(tmp_path: Path) -> None:
    ranks("stress", "_exit", recorder="native", directory=tmp_path / "log")
    lefts = processes.salvaged(tmp_path / "log")
    assert sum(len(left.records) for left in lefts) == 2 * 1126
    assert {State(state) for left in lefts for state in left.records["state"]} == {State.COMPLETE, State.FAILED}


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_no_thread_writes_where_it_must_not(sanitizer: str, tmp_path: Path) -> None:
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    flags = ["-std=c++17", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}"]
    build = processes.run([COMPILER, *flags, FOLDER / "slots_race.cpp", "-o", tmp_path / "race"])
    if build.status and "cannot find" in build.err:
        pytest.skip(f"there is no {sanitizer} sanitizer")
    assert build.status == 0, build.err
    result = processes.run([tmp_path / "race"], ASAN_OPTIONS="detect_leaks=0")
    assert result.status == 0, result.out + result.err


def test_without_a_library_the_python_recorder_records(tmp_path: Path) -> None:
    code = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
dist.all_reduce(torch.ones(3))
import time; time.sleep(0.5)
"""
    for recorder, said in (("native", "commtrace build"), ("auto", "")):
        log = tmp_path / recorder
        empty = tmp_path / "empty"
        result = processes.python(code, COMMTRACE=log, COMMTRACE_RECORDER=recorder, XDG_CACHE_HOME=empty)
        assert result.status == 0
        assert said in result.err
        assert processes.read_one(log).tables["process"][0]["recorder"] == "python"
