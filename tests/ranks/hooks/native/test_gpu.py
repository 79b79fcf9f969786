"""Device times on a real GPU, compared with torch's profiler: one GPU, NCCL with one rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import processes
import pytest
import recorders
from hook_programs.runs import FOLDER

from commtrace.schema import Clock, Flag, State

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

SETTINGS: dict[str, Any] = {"COMMTRACE_RECORDER": "native", "COMMTRACE_DEVICE_TIMES": 1, "COMMTRACE_DRAIN_MS": 50}


def run(case: str, folder: Path, **variables: Any) -> dict[str, Any]:
    """Run a case of the program, and return its own account."""
    recorders.needs("native")
    result = processes.run([sys.executable, FOLDER / "on_gpu.py", case, folder], limit=280, **SETTINGS, **variables)
    assert result.status == 0, result.err[-8000:]
    return dict(json.loads((folder / "told.json").read_text()))


def calls(folder: Path, account: dict[str, Any]) -> list[Any]:
    """Return the records of the calls of a case in call order."""
    left = processes.read_one(folder / "log")
    assert left.stats["hook_errors"] == 0, left.stats["first_error"]
    records = left.records[left.records["t_begin"].argsort(kind="stable")]
    return [record for record in records if account["begin"] <= record["t_begin"] <= account["end"]]


@pytest.mark.parametrize("case", ["durations", "waited"])
def test_durations_are_those_of_the_profiler(case: str, tmp_path: Path) -> None:
    account = run(case, tmp_path, COMMTRACE=tmp_path / "log")
    records = calls(tmp_path, account)
    assert len(records) == len(account["durations"]) == 20
    for call, expected in zip(records, account["durations"], strict=True):
        assert (State(call["state"]), Clock(call["clock"])) == (State.COMPLETE, Clock.DEVICE)
        assert int(call["t_end"]) - int(call["t_start"]) == pytest.approx(expected, rel=0.05)


def test_a_captured_graph_captures_and_replays(tmp_path: Path) -> None:
    account = run("graph", tmp_path, COMMTRACE=tmp_path / "log")
    assert account["results"] == [[2.0], [6.0]]
    records = calls(tmp_path, account)
    assert len(records) == 2
    for call in records:
        assert Flag(int(call["flags"])) & Flag.CAPTURED
        assert (State(call["state"]), call["t_start"], call["t_end"]) == (State.UNOBSERVABLE, 0, 0)


def test_a_step_whose_calls_overlap_is_as_fast(tmp_path: Path) -> None:
    """The median traced run is at most 5% slower than the median untraced one: lost overlap shows only in this way."""
    account = run("overlap", tmp_path)
    assert account["traced"] <= account["untraced"] * 1.05
    timed = 0
    for turn in range(20):
        left = processes.read_one(tmp_path / f"log{turn}")
        assert left.stats["hook_errors"] == 0, left.stats["first_error"]
        timed += int((left.records["state"] == State.COMPLETE).sum())
    assert timed == 20 * 20 * 8
