"""Device times on a real GPU, beside what torch's profiler says. One GPU, NCCL with one rank."""

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
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device: not run"),
]

SETTINGS: dict[str, Any] = {"COMMTRACE_RECORDER": "native", "COMMTRACE_DEVICE_TIMES": 1, "COMMTRACE_DRAIN_MS": 50}


def run(case: str, folder: Path, **variables: Any) -> dict[str, Any]:
    """What the program told."""
    recorders.needs("native")
    result = processes.run([sys.executable, FOLDER / "on_gpu.py", case, folder], limit=280, **SETTINGS, **variables)
    assert result.status == 0, result.err[-8000:]
    return dict(json.loads((folder / "told.json").read_text()))


def calls(folder: Path, told: dict[str, Any]) -> list[Any]:
    """Records of the calls that were made meanwhile, in their order."""
    left = processes.read_one(folder / "log")
    assert left.stats["hook_errors"] == 0, left.stats["first_error"]
    records = left.records[left.records["t_begin"].argsort(kind="stable")]
    return [record for record in records if told["begin"] <= record["t_begin"] <= told["end"]]


@pytest.mark.parametrize("case", ["durations", "waited"])
def test_durations_are_those_of_the_profiler(case: str, tmp_path: Path) -> None:
    told = run(case, tmp_path, COMMTRACE=tmp_path / "log")
    found = calls(tmp_path, told)
    assert len(found) == len(told["durations"]) == 20
    for call, expected in zip(found, told["durations"], strict=True):
        assert (State(call["state"]), Clock(call["clock"])) == (State.COMPLETE, Clock.DEVICE)
        assert int(call["t_end"]) - int(call["t_start"]) == pytest.approx(expected, rel=0.05)


def test_a_captured_graph_captures_and_replays(tmp_path: Path) -> None:
    told = run("graph", tmp_path, COMMTRACE=tmp_path / "log")
    assert told["results"] == [[2.0], [6.0]]
    found = calls(tmp_path, told)
    assert len(found) == 2
    for call in found:
        assert Flag(int(call["flags"])) & Flag.CAPTURED
        assert (State(call["state"]), call["t_start"], call["t_end"]) == (State.UNOBSERVABLE, 0, 0)


def test_a_step_whose_calls_overlap_is_as_fast(tmp_path: Path) -> None:
    """The median of 20 pairs of turns on one device: the only way to see an overlap that was lost."""
    told = run("overlap", tmp_path)
    assert told["traced"] <= told["untraced"] * 1.05
    timed = 0
    for turn in range(20):
        left = processes.read_one(tmp_path / f"log{turn}")
        assert left.stats["hook_errors"] == 0, left.stats["first_error"]
        timed += int((left.records["state"] == State.COMPLETE).sum())
    assert timed == 20 * 20 * 8
