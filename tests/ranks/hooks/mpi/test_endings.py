"""However a program of mpi4py begins and ends: what it recorded is there, under one name."""

from __future__ import annotations

from pathlib import Path

import mpi_launch
import processes
import pytest
from ports import free_port

pytest.importorskip("mpi4py")


def operations(left: processes.Left) -> list[str]:
    """In the order in which they were called."""
    kinds = {row["id"]: row["variant"] for row in left.tables["kinds"]}
    return [kinds[kind] for kind in left.records[left.records["t_begin"].argsort()]["kind"]]


@pytest.mark.parametrize("how", ["well", "initialized late", "finalized", "forked"])
def test_every_call_is_in_the_log(mpi: str, how: str, tmp_path: Path) -> None:
    late = {"MPI4PY_RC_INITIALIZE": 0} if how == "initialized late" else {}
    mpi_launch.succeeds(mpi, "ending", how, ranks=2, log=tmp_path / "log", **late)
    left = processes.read_all(tmp_path / "log")
    assert [one.tables["process"][0]["rank"] for one in left] == [0, 1]
    assert len(list((tmp_path / "log").iterdir())) == 1
    for one in left:
        assert operations(one) == ["Allreduce"] * (6 if how == "forked" else 5)
        assert one.ended
        assert one.stats["hook_errors"] == 0, one.stats["first_error"]


@pytest.mark.parametrize("how", ["without cleaning up", "aborted", "killed"])
def test_what_a_process_leaves_behind_is_brought_home(mpi: str, how: str, tmp_path: Path) -> None:
    result = mpi_launch.run(mpi, "ending", how, ranks=2, log=tmp_path / "log")
    assert result.status != 0 or how == "without cleaning up"
    # A launcher may be back before the last of its processes is gone.
    processes.wait_for(lambda: len(processes.salvaged(tmp_path / "log")) == 2)
    left = processes.read_all(tmp_path / "log")
    assert [one.tables["process"][0]["rank"] for one in left] == [0, 1]
    expected = ["Allreduce"] * 5 + (["Barrier"] if how == "killed" else [])
    assert [operations(one) for one in left] == [expected] * 2


def test_two_runs_into_one_directory_are_two(mpi: str, tmp_path: Path) -> None:
    for _ in range(2):
        mpi_launch.succeeds(mpi, "ending", "well", ranks=2, log=tmp_path / "log")
    assert [len(list(run.glob("*/*.jsonl"))) for run in (tmp_path / "log").iterdir()] == [2, 2]


def test_processes_that_were_spawned_are_another_run(mpi: str, tmp_path: Path) -> None:
    mpi_launch.succeeds(mpi, "ending", "spawned", ranks=1, log=tmp_path / "log")
    runs = sorted((tmp_path / "log").iterdir())
    assert len(runs) == 2
    left = [processes.read(path) for run in runs for path in run.glob("*/*.jsonl")]
    assert sorted(operations(one)[5:] for one in left) == [["recv", "send"], ["send", "recv"]]
    assert all((one.records["peer"][one.records["tag"] >= 0] == -1).all() for one in left)


def test_torch_beside_it_writes_into_the_same_log(mpi: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    mpi_launch.succeeds(mpi, "ending", "with torch", tmp_path / "store", ranks=2, log=tmp_path / "log")
    left = processes.read_all(tmp_path / "log")
    assert [one.tables["process"][0]["rank"] for one in left] == [0, 1]
    assert len(list((tmp_path / "log").iterdir())) == 1
    for one in left:
        assert operations(one) == ["Allreduce"] * 5 + ["bcast", "allreduce_", "Allreduce", "Bcast"]
        apis = {row["variant"]: row["api"] for row in one.tables["kinds"]}
        assert apis == {"Allreduce": "mpi", "bcast": "mpi", "allreduce_": "torch", "Bcast": "mpi"}
        dtypes = {row["variant"]: row["dtype"] for row in one.tables["kinds"]}
        assert dtypes["Bcast"] == "int32"
        spots = " ".join(one.tables["process"][0]["blind_spots"])
        assert "Request" in spots


def test_deepspeed_that_asks_mpi_who_it_is_has_one_log(mpi: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    port = free_port()
    mpi_launch.succeeds(
        mpi, "deepspeed_discovery", port, ranks=2, log=tmp_path / "log", limit=150, DS_ACCELERATOR="cpu"
    )
    left = processes.read_all(tmp_path / "log")
    assert len(list((tmp_path / "log").iterdir())) == 1
    assert [one.tables["process"][0]["rank"] for one in left] == [0, 1]
    for one in left:
        assert operations(one) == ["bcast", "allgather", "allreduce_", "Barrier"]
        assert one.ended
        assert one.stats["hook_errors"] == 0, one.stats["first_error"]


def test_tracing_can_be_stopped_and_started(mpi: str, tmp_path: Path) -> None:
    mpi_launch.succeeds(mpi, "ending", "again", tmp_path / "second", ranks=2, log=tmp_path / "log")
    assert [operations(one) for one in processes.read_all(tmp_path / "log")] == [["Allreduce"] * 5] * 2
    assert [operations(one) for one in processes.read_all(tmp_path / "second")] == [["Allreduce"] * 2] * 2
