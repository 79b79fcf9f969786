"""The native recorder: the same records as the portable one, at any end of a program."""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import processes

from commtrace.errors import CommtraceError
from commtrace.schema import Clock, Flag, State

FOLDER = Path(__file__).with_name("native_programs")
COMPILER = shutil.which("g++")

_folders: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def built() -> Path:
    """The library, in the user's cache, where it stays for the next time."""
    from commtrace.hooks.native import library

    try:
        return library.build()
    except CommtraceError as error:
        pytest.skip(str(error))


def ranks(program: str, *arguments: str, recorder: str, directory: Path, **variables: Any) -> list[processes.Left]:
    """The logs of two ranks of a program."""
    built()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    command = [*launcher, str(processes.free_port()), str(FOLDER / f"{program}.py"), *arguments]
    variables = {"COMMTRACE": directory, "COMMTRACE_RECORDER": recorder, "PYTHONFAULTHANDLER": 1, **variables}
    result = processes.run(command, limit=150, **variables)
    assert result.status == 0, result.err[-6000:]
    return processes.read_all(directory)


def folder() -> Path:
    _folders.append(tempfile.TemporaryDirectory())
    return Path(_folders[-1].name) / "log"


@functools.cache
def operators(recorder: str) -> list[processes.Left]:
    return ranks("operators", recorder=recorder, directory=folder())


def resolved(left: processes.Left) -> list[dict[str, Any]]:
    """What two recorders must agree on: all but times, ends and the numbers of rows."""
    rows = {name: {row["id"]: row for row in left.tables[name]} for name in ("kinds", "groups", "sites")}
    same = ("payload", "local", "seq", "step", "micro_batch", "peer", "tag", "batch", "phase", "flags", "thread")
    calls = []
    for record in left.records[left.records["t_begin"].argsort()]:
        call: dict[str, Any] = {name: int(record[name]) for name in same}
        for table, field in (("kinds", "kind"), ("groups", "group"), ("sites", "site")):
            row = rows[table][int(record[field])]
            call |= {f"{table}.{name}": value for name, value in row.items() if name != "id"}
        calls.append(call)
    return calls


@pytest.mark.parametrize("rank", [0, 1])
def test_both_recorders_make_the_same_records(rank: int) -> None:
    python, native = (operators(recorder)[rank] for recorder in ("python", "native"))
    for ours, theirs in zip(resolved(native), resolved(python), strict=True):
        assert ours == theirs
    assert [left.tables["process"][0]["recorder"] for left in (python, native)] == ["python", "native"]
    for left in (python, native):
        assert left.stats["hook_errors"] == 0, left.stats["first_error"]
        assert left.stats["cost_samples"] > 0


@pytest.mark.parametrize("rank", [0, 1])
def test_every_end_on_the_host_is_seen(rank: int) -> None:
    """DDP's reducer waits in C++, and some Works are waited for by nobody; a call that was refused has failed."""
    (left,) = (operators("native")[rank],)
    records = left.records
    assert set(records["state"].tolist()) == {State.COMPLETE, State.FAILED}
    assert (records["state"] == State.FAILED).sum() == 1
    done = records[records["state"] == State.COMPLETE]
    assert (done["t_end"] >= done["t_begin"]).all()
    ops = {row["id"]: row["op"] for row in left.tables["kinds"]}
    for record in done:  # gloo gives a message no future
        by = Clock.WAIT if ops[record["kind"]] in ("send", "recv") else Clock(record["clock"])
        assert record["clock"] == by
    waited = done[(done["flags"] & Flag.ASYNC == 0) & (done["clock"] == Clock.FUTURE)]
    assert (waited["t_wait"] >= waited["t_return"])[waited["t_wait"] > 0].all()


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
