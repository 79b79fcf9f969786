"""However an mpi4py program starts and ends, its calls are in the log, in one run."""

from __future__ import annotations

from pathlib import Path

import mpi_launch
import processes
import pytest
from ports import free_port

pytest.importorskip("mpi4py")


def operations(log: processes.Left) -> list[str]:
    """Return the variants of a log's calls in call order."""
    kinds = {row["id"]: row["variant"] for row in log.tables["kinds"]}
    return [kinds[kind] for kind in log.records[log.records["t_begin"].argsort()]["kind"]]


@pytest.mark.parametrize("how", ["well", "initialized late", "finalized", "forked"])
def test_every_call_is_in_the_log(mpi: str, how: str, tmp_path: Path) -> None:
    late = {"MPI4PY_RC_INITIALIZE": 0} if how == "initialized late" else {}
    mpi_launch.succeeds(mpi, "ending", how, ranks=2, log=tmp_path / "log", **late)
    logs = processes.read_all(tmp_path / "log")
    assert [log.tables["process"][0]["rank"] for log in logs] == [0, 1]
    assert len(list((tmp_path / "log").iterdir())) == 1
    for log in logs:
        assert operations(log) == ["Allreduce"] * (6 if how == "forked" else 5)
        assert log.ended
        assert log.stats["hook_errors"] == 0, log.stats["first_error"]


@pytest.mark.parametrize("how", ["without cleaning up", "aborted", "killed"])
def test_what_a_process_leaves_behind_is_brought_home(mpi: str, how: str, tmp_path: Path) -> None:
    result = mpi_launch.run(mpi, "ending", how, ranks=2, log=tmp_path / "log")
    assert result.status != 0 or how == "without cleaning up"
    # A launcher may return before the last of its processes has ended.
    processes.wait_for(lambda: len(processes.salvaged(tmp_path / "log")) == 2)
    logs = processes.read_all(tmp_path / "log")
    assert [log.tables["process"][0]["rank"] for log in logs] == [0, 1]
    expected = ["Allreduce"] * 5 + (["Barrier"] if how == "killed" else [])
    assert [operations(log) for log in logs] == [expected] * 2


def test_two_runs_into_one_directory_are_two(mpi: str, tmp_path: Path) -> None:
    for _ in range(2):
        mpi_launch.succeeds(mpi, "ending", "well", ranks=2, log=tmp_path / "log")
    assert [len(list(run.glob("*/*.jsonl"))) for run in (tmp_path / "log").iterdir()] == [2, 2]


def test_processes_that_were_spawned_are_another_run(mpi: str, tmp_path: Path) -> None:
    mpi_launch.succeeds(mpi, "ending", "spawned", ranks=1, log=tmp_path / "log")
    runs = sorted((tmp_path / "log").iterdir())
    assert len(runs) == 2
    logs = [processes.read(path) for run in runs for path in run.glob("*/*.jsonl")]
    assert sorted(operations(log)[5:] for log in logs) == [["recv", "send"], ["send", "recv"]]
    assert all((log.records["peer"][log.records["tag"] >= 0] == -1).all() for log in logs)


@pytest.mark.long
def test_torch_beside_it_writes_into_the_same_log(mpi: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    mpi_launch.succeeds(mpi, "ending", "with torch", tmp_path / "store", ranks=2, log=tmp_path / "log")
    logs = processes.read_all(tmp_path / "log")
    assert [log.tables["process"][0]["rank"] for log in logs] == [0, 1]
    assert len(list((tmp_path / "log").iterdir())) == 1
    for log in logs:
        assert operations(log) == ["Allreduce"] * 5 + ["bcast", "allreduce_", "Allreduce", "Bcast"]
        apis = {row["variant"]: row["api"] for row in log.tables["kinds"]}
        assert apis == {"Allreduce": "mpi", "bcast": "mpi", "allreduce_": "torch", "Bcast": "mpi"}
        dtypes = {row["variant"]: row["dtype"] for row in log.tables["kinds"]}
        assert dtypes["Bcast"] == "int32"
        spots = " ".join(log.tables["process"][0]["blind_spots"])
        assert "Request" in spots


@pytest.mark.long
def test_deepspeed_that_asks_mpi_who_it_is_has_one_log(mpi: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    port = free_port()
    mpi_launch.succeeds(
        mpi, "deepspeed_discovery", port, ranks=2, log=tmp_path / "log", limit=150, DS_ACCELERATOR="cpu"
    )
    logs = processes.read_all(tmp_path / "log")
    assert len(list((tmp_path / "log").iterdir())) == 1
    assert [log.tables["process"][0]["rank"] for log in logs] == [0, 1]
    for log in logs:
        assert operations(log) == ["bcast", "allgather", "allreduce_", "Barrier"]
        assert log.ended
        assert log.stats["hook_errors"] == 0, log.stats["first_error"]


def test_tracing_can_be_stopped_and_started(mpi: str, tmp_path: Path) -> None:
    mpi_launch.succeeds(mpi, "ending", "again", tmp_path / "second", ranks=2, log=tmp_path / "log")
    assert [operations(log) for log in processes.read_all(tmp_path / "log")] == [["Allreduce"] * 5] * 2
    assert [operations(log) for log in processes.read_all(tmp_path / "second")] == [["Allreduce"] * 2] * 2
