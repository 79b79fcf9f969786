"""A real GPU: device times are those of torch's profiler; all operations and trainings of ranks that share the GPU."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import operator_rows
import processes
import pytest
import recorders
from hook_programs.runs import FOLDER, Call, Log, launch, logs, new_folder

import commtrace
from commtrace.importing.import_run import import_files
from commtrace.schema import Clock, Flag, State

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

SETTINGS: dict[str, Any] = {
    "COMMTRACE_DEVICE_TIMES": 1, "COMMTRACE_DRAIN_MS": 50,
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
}  # fmt: skip


def told(folder: Path, *cases: str, **variables: Any) -> dict[str, dict[str, Any]]:
    """Run cases of the program in one process, and return its own account by case."""
    recorders.needs("native")
    command: list[str | Path] = [sys.executable, FOLDER / "on_gpu.py", folder, *cases]
    result = processes.run(command, limit=280, COMMTRACE_RECORDER="native", **SETTINGS, **variables)
    assert result.status == 0, result.err[-8000:]
    accounts: dict[str, dict[str, Any]] = json.loads((folder / "told.json").read_text())
    return accounts


@functools.cache
def traced() -> tuple[dict[str, dict[str, Any]], Log]:
    """Run all cases that are traced as a whole."""
    folder = new_folder()
    accounts = told(folder, "durations", "waited", "groups", "coalesced", "graph", COMMTRACE=folder / "log")
    (log,) = logs(folder / "log", "native")
    return accounts, log


def case(name: str) -> tuple[dict[str, Any], list[Call]]:
    """Return the program's account of a case, and its calls."""
    accounts, log = traced()
    return accounts[name], log.between(accounts[name]["begin"], accounts[name]["end"])


def spans(calls: Sequence[Call]) -> list[int]:
    """Return the ns of each call on the device. Assert that its end is exact."""
    assert {(call.state, call.clock) for call in calls} == {(State.COMPLETE, Clock.DEVICE)}
    return [call.t_end - call.t_start for call in calls]


@pytest.mark.parametrize(("name", "count"), [("durations", 20), ("waited", 20), ("groups", 6)])
def test_durations_are_those_of_the_profiler(name: str, count: int) -> None:
    account, calls = case(name)
    assert len(account["durations"]) == count
    assert spans(calls) == pytest.approx(account["durations"], rel=0.05)


def test_a_batch_lasts_as_long_as_its_calls_together() -> None:
    account, calls = case("coalesced")
    durations = account["durations"]
    half = len(durations) // 2
    assert all(call.flags & Flag.COALESCED for call in calls)
    assert spans(calls) == pytest.approx([sum(durations[:half]), sum(durations[half:])], rel=0.05)


def test_a_captured_graph_captures_and_replays() -> None:
    account, calls = case("graph")
    assert account["results"] == [[2.0], [6.0]]
    assert len(calls) == 2
    for call in calls:
        assert call.flags & Flag.CAPTURED
        assert (call.state, call.t_start, call.t_end) == (State.UNOBSERVABLE, 0, 0)


def test_a_step_whose_calls_overlap_is_as_fast(tmp_path: Path) -> None:
    """The median traced run is at most 5% slower than the median untraced one: lost overlap shows only in this way."""
    account = told(tmp_path, "overlap")["overlap"]
    assert account["traced"] <= account["untraced"] * 1.05
    timed = 0
    for turn in range(20):
        left = processes.read_one(tmp_path / f"log{turn}")
        assert left.stats["hook_errors"] == 0, left.stats["first_error"]
        timed += int((left.records["state"] == State.COMPLETE).sum())
    assert timed == 20 * 20 * 8


# ---- ranks that share the GPU ----------------------------------------------------------------------------------------


@functools.cache
def operations(recorder: str) -> tuple[list[dict[str, Any]], list[Log]]:
    """Run every operation on NCCL, and return what each rank tells and its log."""
    recorders.needs(recorder)
    folder = new_folder()
    launch(
        "operators", folder, "nccl", "cuda",
        log=folder / "log", recorder=recorder, ranks=operator_rows.RANKS, ONE_GPU=1, **SETTINGS,
    )  # fmt: skip
    accounts = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(operator_rows.RANKS)]
    return accounts, logs(folder / "log", recorder)


FLAGS = {"all_gather_coalesced": Flag.COALESCED, "batch_isend_irecv": Flag.ASYNC | Flag.COALESCED}
"""Flags of a case that are others than with gloo and the newest torch: the first is asynchronous before torch 2.13."""


def ends(call: Call, recorder: str) -> set[tuple[State, Clock]]:
    """Return what may be said of the end of a call on the GPU (docs/explanation/device-times.md)."""
    unknown = {(State.UNOBSERVABLE, Clock.NONE), (State.RETURNED, Clock.NONE)}
    return (
        unknown
        if recorder == "python"
        else unknown | {(State.COMPLETE, Clock.DEVICE), (State.COMPLETE, Clock.DEVICE_WAIT)}
    )


@pytest.mark.parametrize("recorder", recorders.RECORDERS)
@pytest.mark.parametrize("rank", range(operator_rows.RANKS))
def test_every_call_of_every_operation_is_recorded_as_it_was_made(rank: int, recorder: str) -> None:
    accounts, by_rank = operations(recorder)
    wrong: dict[str, Any] = {}
    checked = 0
    for name in [*operator_rows.COMMON, *operator_rows.EACH]:
        account = accounts[rank].get(name)
        if account is None or account["unsupported"]:
            continue
        expected, found = operator_rows.rows(name, rank), by_rank[rank].between(account["begin"], account["end"])
        checked += 1
        seen = [operator_rows.row(call, wanted.how) for call, wanted in zip(found, expected, strict=False)]
        if name in FLAGS:
            seen, expected = ([row._replace(flags=FLAGS[name]) for row in rows] for rows in (seen, expected))
        if len(found) != len(expected) or seen != expected:
            wrong[name] = (found, expected)
        for call in found:
            if call.state != State.FAILED and (call.state, call.clock) not in ends(call, recorder):
                wrong[f"{name}: end"] = call
    assert not wrong
    assert checked >= 35


@functools.cache
def training(engine: str, profiled: bool) -> Path:
    """Train on two ranks, traced and recorded by torch's profiler, or neither; return the folder of what is left."""
    recorders.needs("native")
    pytest.importorskip("transformers")
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed")
    folder = new_folder()
    settings = {**SETTINGS, "ONE_GPU": 1, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PROFILE": int(profiled)}
    launch("gpu_training", folder, engine, log=folder / "log" if profiled else None, recorder="native", **settings)
    return folder


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero1", "zero3"])
def test_a_training_is_bit_equal_and_imported_from_the_profiler_as_it_was_recorded(engine: str) -> None:
    folder = training(engine, True)
    import_files(sorted((folder / "traces").glob("*.json.gz")), folder / "imported")
    for rank, log in enumerate(logs(folder / "log", "native")):
        account, bare = (
            json.loads((where / f"{engine}-rank{rank}.json").read_text()) for where in (folder, training(engine, False))
        )
        assert account["losses"] == bare["losses"]
        calls = log.between(account["begin"], account["end"])
        imported = commtrace.open(folder / "imported").events(ranks=[rank])
        assert imported["op"].tolist() == [call.op for call in calls]
        assert imported["payload_bytes"].tolist() == [call.payload for call in calls]
        if engine == "fsdp2":
            assert {call.clock for call in calls} == {Clock.DEVICE}
        timed = [number for number, call in enumerate(calls) if call.clock == Clock.DEVICE]
        kernels = (imported["t_end_ns"] - imported["t_start_ns"]).iloc[timed].tolist()
        longer = [span - kernel for span, kernel in zip(spans([calls[n] for n in timed]), kernels, strict=True)]
        assert all(more >= -10_000 for more in longer)
        # The ranks share the GPU by turns: what precedes a kernel may run in the turn before.
        close = [more <= 0.05 * kernel + 10_000 for more, kernel in zip(longer, kernels, strict=True)]
        assert sum(close) >= 0.8 * len(close)
