"""Process groups that are not registered in torch.distributed: calls are recorded, or a warning names them."""

from __future__ import annotations

from pathlib import Path

import processes
import pytest
from ranks import Nursery

from commtrace.hooks.torch.process_groups import likely_ranks
from commtrace.run import open_run
from commtrace.schema import State


@pytest.mark.long
def test_groups_made_by_hand_are_recorded(nursery: Nursery, tmp_path: Path) -> None:
    statuses, outputs = nursery.run("hand_made", tmp_path / "log", "groups")
    assert (statuses, outputs) == ([0, 0], ["[4.0, 4.0, 4.0, 4.0]\n"] * 2)
    log = open_run(tmp_path / "log", recover=False)
    assert log.table("coverage")["hook_errors"].tolist() == [0]
    # Each process has its own run: without torch.distributed there is no store in which to agree on one.
    for left in processes.read_all(tmp_path / "log"):
        (group,) = left.tables["groups"]
        assert (group["ranks"], group["name"]) == ("0-1", "unregistered")
        ops = {row["id"]: row["op"] for row in left.tables["kinds"]}
        made = [(ops[call["kind"]], int(call["payload"]), int(call["peer"])) for call in left.records]
        rank = left.tables["process"][0]["rank"]
        message = ("send", 16, 1) if rank == 0 else ("recv", 16, 0)
        expected = [
            *(("all_reduce", 16, -1), ("broadcast", 16, 1), ("all_gather", 32, -1), message),
            *(("all_reduce", 16, -1), ("barrier", 0, -1)),
        ]
        assert sorted(made) == sorted(expected)


def test_direct_calls_on_a_backend_object_are_recorded(nursery: Nursery, tmp_path: Path) -> None:
    statuses, (output, _) = nursery.run("hand_made", tmp_path / "log", "backend_object")
    assert statuses == [0, 0], output
    _, (untraced, _) = nursery.run("hand_made", tmp_path / "untraced", "backend_object", traced=False)
    assert output == untraced
    for left in processes.read_all(tmp_path / "log"):
        assert left.stats["hook_errors"] == 0, left.stats["first_error"]
        (group,) = left.tables["groups"]
        assert (group["ranks"], group["name"], group["desc"]) == ("0-1", "unregistered", "backend object")
        kinds = {row["id"]: (row["variant"], row["reduce_op"]) for row in left.tables["kinds"]}
        calls = left.records[left.records["t_begin"].argsort()]
        message = "send" if left.tables["process"][0]["rank"] == 0 else "recv"
        assert [(*kinds[call["kind"]], int(call["payload"]), int(call["peer"])) for call in calls] == [
            ("Backend.allreduce", "SUM", 16, -1),
            ("Backend.allreduce", "MAX", 16, -1),
            ("Backend.broadcast", None, 16, 1),
            ("Backend.reduce", "SUM", 16, 1),
            ("Backend.reduce", "SUM", 16, 0),
            ("Backend.allgather", None, 32, -1),
            ("Backend.allgather", None, 32, -1),
            ("Backend._allgather_base", None, 32, -1),
            ("Backend.gather", None, 32, 0),
            ("Backend.alltoall_base", None, 16, -1),
            (f"Backend.{message}", None, 16, 1 if message == "send" else 0),
            ("Backend.allreduce", "SUM", 16, -1),
            ("Backend.barrier", None, 0, -1),
        ]
        end = State.COMPLETE if nursery.recorder == "python" else State.UNOBSERVABLE
        assert {int(call["state"]) for call in calls} == {end}


def test_a_direct_call_that_the_backend_refuses_is_no_missing_record(nursery: Nursery, tmp_path: Path) -> None:
    statuses, (output, _) = nursery.run("hand_made", tmp_path / "log", "wrong_arguments")
    assert (statuses, output) == ([0, 0], "refused None\n" * 3 + "called\n")
    for left in processes.read_all(tmp_path / "log"):
        assert (left.stats["hook_errors"], left.stats["unrecorded"], len(left.records)) == (0, 0, 1)


def test_of_ranks_that_are_threads_one_is_recorded_and_the_others_are_refused(nursery: Nursery, tmp_path: Path) -> None:
    (status,), (output,) = nursery.run("hand_made", tmp_path / "log", "threads", ranks=1)
    assert status == 0
    assert output.endswith("[[4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]\n")
    assert output.count("commtrace: ranks are threads of one process") == 1
    run = open_run(tmp_path / "log")
    assert len(run.events()) == 2
    (coverage,) = run.table("coverage").itertuples()
    assert coverage.hook_errors == 2
    assert "ranks are threads of one process" in str(coverage.first_error)


@pytest.mark.parametrize(
    ("case", "warning"),
    [
        ("python_class", "InPython, a class written in Python, are recorded only if the class forwards them"),
        ("local_tensors", "calls within LocalTensorMode are not recorded"),
        ("symmetric_memory", "transfers through symmetric memory (symm_mem::) are not recorded"),
    ],
)
def test_calls_that_no_hook_sees_are_named_once(nursery: Nursery, tmp_path: Path, case: str, warning: str) -> None:
    (status,), (output,) = nursery.run("hand_made", tmp_path / "log", case, ranks=1)
    assert status == 0
    assert output.count(warning) == 1
    _, (untraced,) = nursery.run("hand_made", tmp_path / "untraced", case, ranks=1, traced=False)
    assert untraced == "called\n"


def test_ranks_of_an_unregistered_group_have_this_process_in_its_place() -> None:
    assert likely_ranks(4, 1, 1) == [0, 1, 2, 3]
    assert likely_ranks(2, 1, 7) == [6, 7]
    assert likely_ranks(3, 2, 0) == [2, 1, 0]
