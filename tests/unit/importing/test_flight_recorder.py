"""Imports of flight-recorder dumps: calls, verdicts on hangs, and files that are no plain dumps."""

from __future__ import annotations

import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest

import commtrace
from commtrace.errors import ImportFileError
from commtrace.importing.import_run import import_files

BASE_NS = 1_700_000_000_000_000_000
RANKS = 4


def entry(seq: int, state: str = "completed", **fields: Any) -> dict[str, Any]:
    began = BASE_NS + seq * 1_000_000
    ended = began + 500_000 if state == "completed" else None
    return {
        "record_id": seq, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": seq, "is_p2p": False,
        "profiling_name": "nccl:all_reduce", "time_created_ns": began, "time_discovered_started_ns": began,
        "time_discovered_completed_ns": ended, "duration_ms": None, "input_sizes": [[10, 10]],
        "input_dtypes": ["Float"], "output_sizes": [[10, 10]], "output_dtypes": ["Float"], "state": state,
        "timeout_ms": 600_000,
        "frames": [
            {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/distributed_c10d.py", "line": 9},
            {"name": "step", "filename": "/home/me/train.py", "line": 31},
        ], **fields,
    }  # fmt: skip


def dump(folder: Path, rank: int, entries: list[dict[str, Any]], *, as_json: bool = False, later_s: int = 60) -> Path:
    """Write a dump, as the recorder of a rank does, some seconds after the first call."""
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str([*range(RANKS)])}}
    content = {"version": "2.10", "nccl_version": "2.21.5", "pg_config": config, "pg_status": {}, "entries": entries}
    path = folder / f"nccl_trace_rank_{rank}"
    path.write_bytes(json.dumps(content).encode() if as_json else pickle.dumps(content))
    os.utime(path, ns=(BASE_NS + later_s * 10**9,) * 2)
    return path


def imported(tmp_path: Path) -> commtrace.Run:
    import_files([tmp_path / "dumps"], tmp_path / "log")
    return commtrace.open(tmp_path / "log")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "dumps").mkdir()
    return tmp_path / "dumps"


@pytest.mark.parametrize("as_json", [False, True])
def test_calls_of_a_dump(folder: Path, tmp_path: Path, as_json: bool) -> None:
    dump(folder, 2, [entry(7), entry(8, profiling_name="nccl:send 2->1", is_p2p=True)], as_json=as_json)
    events = imported(tmp_path).events()
    assert events["op"].tolist() == ["all_reduce", "send"]
    assert events["payload_bytes"].tolist() == [400, 400]
    assert events["rank"].tolist() == [2, 2]
    assert events["seq"].tolist()[0] == 7
    assert events["peer"].tolist() == [-1, 1]
    assert events["group_ranks"].tolist() == ["0-3", "0-3"]
    assert events["site"].tolist() == ["me/train.py:31 step"] * 2
    assert (events["t_end_ns"] - events["t_begin_ns"]).tolist() == [500_000] * 2


def test_a_rank_that_never_came_is_named(folder: Path, tmp_path: Path) -> None:
    for rank in range(RANKS):
        last = [] if rank == 3 else [entry(11, "started")]
        dump(folder, rank, [*(entry(seq) for seq in range(8, 11)), *last])
    stuck = imported(tmp_path).table("stuck_calls")
    assert stuck[["op", "seq", "waiting_ranks", "absent_ranks"]].to_numpy().tolist() == [["all_reduce", 11, "0-2", "3"]]
    assert stuck["waited_ns"].iloc[0] >= 59 * 10**9


def test_ranks_in_different_operations_disagree(folder: Path, tmp_path: Path) -> None:
    for rank in range(RANKS):
        name = "nccl:broadcast" if rank == 1 else "nccl:all_reduce"
        dump(folder, rank, [entry(10), entry(11, "started", profiling_name=name)])
    stuck = imported(tmp_path).table("stuck_calls")
    assert len(stuck) == 1
    assert "broadcast" in stuck["disagreement"].iloc[0]


def test_dumps_of_a_job_that_does_not_hang_give_no_verdict(folder: Path, tmp_path: Path) -> None:
    for rank in range(RANKS):
        dump(folder, rank, [entry(seq) for seq in range(5)])
    assert len(imported(tmp_path).table("stuck_calls")) == 0


class Runs:
    """An object whose pickle runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({"pg_config": {}, "entries": [Runs()]}),
        pickle.dumps({"pg_config": {}, "entries": [entry(1)]})[:-40],
        pickle.dumps([{"pg_config": {}, "entries": []}]),
        b'{"pg_config": {}, "entries": [' + b"[" * 100_000,
    ],
)
def test_other_pickles_are_refused_and_run_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(content)
    began = time.monotonic()
    with pytest.raises(ImportFileError, match="nccl_trace_rank_0"):
        import_files([path], tmp_path / "log")
    assert not (tmp_path / "ran").exists()
    assert time.monotonic() - began < 60


def test_lists_that_are_in_each_other_are_not_written_out(folder: Path, tmp_path: Path) -> None:
    """Sixty lists, each twice in the next: as text, they are longer than any memory."""
    shared: Any = []
    for _ in range(60):
        shared = [shared, shared]
    names = ("profiling_name", "process_group", "input_dtypes", "input_sizes", "state", "collective_seq_id")
    frames = [{"filename": shared, "name": shared, "line": shared}, shared]
    wrong = [entry(2, **{name: shared}) for name in names]
    dump(folder, 0, [entry(1), *wrong, entry(3, frames=frames), entry(4, process_group=[shared, shared])])
    assert imported(tmp_path).events()["payload_bytes"].notna().sum() >= 3


def test_entries_of_wrong_types_are_left_out(folder: Path, tmp_path: Path) -> None:
    wrong: list[Any] = [{}, entry(2, profiling_name=5), entry(3, input_sizes=[["x"]]), entry(4, frames=7)]
    dump(folder, 0, [entry(1), *wrong, 7])  # type: ignore[list-item]
    run = imported(tmp_path)
    assert run.events()["seq"].tolist() == [1, 4]
    assert any(note.kind == "garbled" for note in run.notes)
