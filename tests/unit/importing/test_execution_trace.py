"""Import of execution traces, alone and beside a Kineto trace of the same process."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from execution_traces import ATTRIBUTED, FLAT, PLAIN, ExecutionTraceFactory
from kineto_traces import KinetoFactory

import commtrace
from commtrace.analyses.scaling.step_times import step_times
from commtrace.errors import LogError
from commtrace.importing.import_run import import_files


def imported(files: dict[str, str], folder: Path) -> commtrace.Run:
    (folder / "traces").mkdir()
    for name, text in files.items():
        (folder / "traces" / name).write_text(text)
    import_files([folder / "traces"], folder / "log")
    return commtrace.open(folder / "log")


def calls(run: commtrace.Run) -> list[tuple[str, str, object]]:
    table = run.events()
    payload = [None if pd.isna(size) else int(size) for size in table["payload_bytes"]]
    return [*zip(table["op"], table["dtype"], payload, strict=True)]


@pytest.mark.parametrize("schema", [FLAT, PLAIN, ATTRIBUTED])
def test_calls_have_sizes_groups_and_order(schema: str, tmp_path: Path) -> None:
    trace = ExecutionTraceFactory(schema, rank=1, pid=7)
    trace.all_reduce(10).all_gather_of_lists(5).all_reduce(3, "c10::BFloat16")
    run = imported({"et.json": trace.text()}, tmp_path)
    assert calls(run) == [("all_reduce", "float32", 40), ("all_gather", "float32", 40), ("all_reduce", "bfloat16", 6)]
    table = run.events()
    assert table["group_ranks"].tolist() == ["0-1"] * 3
    assert table["seq"].tolist() == [0, 1, 2]
    assert table["wire_bytes"].tolist() == [40, 20, 6]
    # Only schemas with the group's first rank and stride say which rank the positions mean.
    assert run.ranks == [1 if schema == ATTRIBUTED else 0]


def test_splits_give_the_own_share_of_an_all_to_all(tmp_path: Path) -> None:
    trace = ExecutionTraceFactory(rank=1)
    sent, received = trace.tensor(8), trace.tensor(6)
    types = ["Tensor(float)", "Tensor(float)", "Object", "GenericList[Int,Int]", "GenericList[Int,Int]", "Int"]
    inputs = [received, sent, "<Object>", [3, 3], [6, 2], -1]
    trace.call("c10d::alltoall_base_", "all_to_all", inputs, types, sent=[sent], received=[received],
               splits=([6, 2], [3, 3]))  # fmt: skip
    table = imported({"rank1.json": trace.text()}, tmp_path).events()
    assert (table["payload_bytes"].tolist(), table["wire_bytes"].tolist()) == ([32], [24])


def test_steps_phases_and_purposes_come_from_what_encloses_a_call(tmp_path: Path) -> None:
    trace = ExecutionTraceFactory()
    for step in (4, 5):
        trace.begin().begin().all_gather_of_lists(2).end("FSDP::pre_forward (layer)").begin(tid=2)
        trace.all_reduce(1, tid=2).end("autograd::engine::evaluate_function: AccumulateGrad", 0, tid=2)
        trace.begin().end("Optimizer.step#SGD.step").end(f"ProfilerStep#{step}")
    run = imported({"rank0.json": trace.text()}, tmp_path)
    table = run.events()
    assert table["step"].tolist() == [4, 4, 5, 5]
    assert table["phase"].tolist() == ["forward", "backward"] * 2
    assert table["purpose"].tolist() == ["parameters gathered for forward", "gradients reduced"] * 2
    assert run.table("step_by_place")["place"].tolist()[0] == "layer"


def test_a_call_below_one_whose_end_is_lost_is_a_call_of_its_own(tmp_path: Path) -> None:
    """An asynchronous send over gloo ends after its operator: the next node is recorded below it."""
    trace = ExecutionTraceFactory(rank=1)
    sent, received = trace.tensor(8), trace.tensor(6)
    types = ["GenericList[Tensor(float)]", "Object", "Int", "Int"]
    trace.begin().call(
        "c10d::recv_", "recv", [[received], "<Object>", 0, 3], types, sent=[received], received=[received]
    )
    trace.end("c10d::send", 0, inputs=[[sent], "<Object>", 0, 3], types=types)
    table = imported({"rank1.json": trace.text()}, tmp_path).events()
    assert table["op"].tolist() == ["send", "recv"]
    assert table["payload_bytes"].tolist() == [32, 24]


def test_an_execution_trace_has_no_times(tmp_path: Path) -> None:
    run = imported({"rank0.json": ExecutionTraceFactory(ranks=1).all_reduce(1).text()}, tmp_path)
    events = run.events()
    assert events[["t_begin_ns", "t_return_ns", "t_end_ns"]].eq(0).all(axis=None)
    not_known = run.table("blind_spots")["blind_spot"].tolist()
    assert any("have no times" in text for text in not_known)
    with pytest.raises(LogError, match="have no times; the times of its steps needs a recorded run"):
        step_times(run)


def kineto(sizes: ExecutionTraceFactory, pid: int, rank: int | None, *, numbered: bool = True) -> str:
    """Return the Kineto trace of the calls of an execution trace: it does not state the types of lists of tensors."""
    nodes = [node for node in json.loads(sizes.text())["nodes"] if "c10d" in node["name"] or "comms" in node["name"]]
    trace = KinetoFactory(rank=rank)
    for at in range(len(nodes) // 2):
        trace.call(100 + 200 * at)
    events = [event for event in trace.events if event["cat"] == "cpu_op"]
    for event, node in zip(events, sorted(nodes, key=lambda node: node["id"]), strict=True):
        event["pid"], event["name"] = pid, node["name"]
        event["args"] = {"Input Dims": [[], [], []], "Input type": ["TensorList", "", ""]}
        if numbered:
            event["args"]["Record function id"] = node["id"]
    return trace.text()


def lists(rank: int, elements: int, pid: int = 7) -> ExecutionTraceFactory:
    return ExecutionTraceFactory(rank=rank, pid=pid).all_gather_of_lists(elements).all_reduce(elements)


def test_a_kineto_trace_alone_lacks_the_sizes_of_lists(tmp_path: Path) -> None:
    run = imported({"rank0.json": kineto(lists(0, 5), 7, 0)}, tmp_path)
    assert calls(run) == [("all_gather", "", None), ("all_reduce", "", None)]


@pytest.mark.parametrize("numbered", [True, False])
def test_an_execution_trace_completes_the_kineto_trace_of_its_process(numbered: bool, tmp_path: Path) -> None:
    """Until PyTorch 2.1, Kineto does not number record functions: calls then belong together by their order."""
    files: dict[str, str] = {}
    for rank, pid in enumerate((7, 8)):
        sizes = lists(rank, 5 + rank, pid)
        files |= {f"rank{rank}.json": kineto(sizes, pid, rank, numbered=numbered), f"et{rank}.json": sizes.text()}
    run = imported(files, tmp_path)
    assert calls(run) == [
        ("all_gather", "float32", 40), ("all_reduce", "float32", 20),
        ("all_gather", "float32", 48), ("all_reduce", "float32", 24),
    ]  # fmt: skip
    assert run.events()["t_begin_ns"].gt(0).all()


def test_a_call_without_operator_is_completed_by_its_number(tmp_path: Path) -> None:
    sizes = lists(0, 5)
    trace = json.loads(kineto(sizes, 7, 0))
    trace["traceEvents"] = [event for event in trace["traceEvents"] if not event["name"].startswith("c10d::")]
    run = imported({"rank0.json": json.dumps(trace), "et.json": sizes.text()}, tmp_path)
    assert [payload for _, _, payload in calls(run)] == [40, 20]


def test_processes_with_equal_ids_are_told_apart_by_their_ranks(tmp_path: Path) -> None:
    files: dict[str, str] = {}
    for rank in range(2):
        sizes = lists(rank, 5 + rank)
        files |= {f"rank{rank}.json": kineto(sizes, 7, rank), f"et{rank}.json": sizes.text()}
    assert [payload for _, _, payload in calls(imported(files, tmp_path))] == [40, 20, 48, 24]


def test_an_execution_trace_of_unknown_rank_completes_nothing(tmp_path: Path) -> None:
    files = {"a.json": kineto(lists(0, 5), 7, 0)}
    for name in ("b", "c"):
        files[f"{name}.json"] = ExecutionTraceFactory(FLAT, rank=0, pid=7).all_reduce(5).text()
    run = imported(files, tmp_path)
    assert {payload for _, _, payload in calls(run)} == {None}
    assert any("which one is of its process is not known" in text for text in run.table("blind_spots")["blind_spot"])


def test_an_execution_trace_of_other_calls_completes_nothing(tmp_path: Path) -> None:
    other = ExecutionTraceFactory(pid=7).all_reduce(5)
    files = {"rank0.json": kineto(lists(0, 5), 7, 0, numbered=False), "et.json": other.text()}
    run = imported(files, tmp_path)
    assert {payload for _, _, payload in calls(run)} == {None}
    assert any("et.json states: it has other calls" in text for text in run.table("blind_spots")["blind_spot"])


def test_a_size_that_is_not_known_is_missing_in_the_typical_step(tmp_path: Path) -> None:
    trace = KinetoFactory()
    for at in range(0, 3000, 1000):
        trace.step(at // 1000, at, 900).event("cpu_op", "autograd::engine::evaluate_function: AccumulateGrad", at, 200)
        trace.call(at + 100).event("cpu_op", "c10d::allgather_", at + 300, 10)
    table = imported({"rank0.json": trace.text()}, tmp_path).table("step_by_purpose").set_index("op")["payload_bytes"]
    assert table["all_reduce"] == 4000
    assert pd.isna(table["all_gather"])
