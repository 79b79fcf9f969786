"""Imports of Kineto traces: each property of the files of torch.profiler, in a small trace with known calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from kineto_traces import BASE_NS, SEND_RECV_KERNEL, KinetoFactory

import commtrace
from commtrace.cli import main
from commtrace.errors import ImportFileError
from commtrace.importing.import_run import import_files
from commtrace.reading.device_work import Work, read_work, spans_of
from commtrace.schema import Flag, Purpose


def imported(tmp_path: Path, *traces: KinetoFactory, name: str = "rank{}.json") -> commtrace.Run:
    paths = [trace.write(tmp_path / name.format(number)) for number, trace in enumerate(traces)]
    import_files(paths, tmp_path / "log")
    return commtrace.open(tmp_path / "log")


def stated(name: str, **more: Any) -> dict[str, Any]:
    """Return arguments of `record_param_comms`."""
    return {"Collective name": name, **more}


def only_call(run: commtrace.Run) -> Any:
    (row,) = run.events().itertuples(index=False)
    return row


@pytest.mark.parametrize("name", ["rank{}.json", "rank{}.json.gz"])
def test_a_call_has_the_times_of_its_kernels(tmp_path: Path, name: str) -> None:
    trace = KinetoFactory().step(3, 0, 900).call(100, kernels=((200.125, 30.5), (240.0, 10.25)))
    run = imported(tmp_path, trace, name=name)
    call = only_call(run)
    assert (call.op, call.group_ranks, call.dtype, call.payload_bytes, call.step) == (
        "all_reduce", "0-1", "float32", 4000, 3,
    )  # fmt: skip
    assert call.t_end_ns - call.t_start_ns == 50_125
    assert call.t_start_ns - call.t_begin_ns == 100_125
    facts = run.processes[0].tables.process
    assert call.t_begin_ns + facts["unix_ns"] - facts["mono_ns"] == BASE_NS + 100_000
    assert call.state == "complete"


@pytest.mark.parametrize(
    ("operation", "comms", "payload", "local"),
    [
        ("all_gather", {"Collective name": "_allgather_base", "Out msg nelems": 2000}, 8000, 4000),
        ("reduce_scatter", {"Collective name": "_reduce_scatter_base", "Out msg nelems": 500}, 4000, 2000),
        ("broadcast", {"Collective name": "broadcast"}, 4000, 0),
        ("all_to_all", {"Collective name": "all_to_allv", "In split size": "[1, 3]"}, 4000, 1000),
        ("all_to_all", {"Collective name": "all_to_all"}, 4000, 2000),
        ("barrier", {"Collective name": "barrier"}, 0, 0),
    ],
)
def test_sizes_follow_the_conventions_of_nccl_tests(
    tmp_path: Path, operation: str, comms: dict[str, Any], payload: int, local: int
) -> None:
    run = imported(tmp_path, KinetoFactory().call(100, operator="unnamed_", **comms))
    (block,) = [block for segment in run.processes[0].segments for block in segment.blocks()]
    assert (only_call(run).op, only_call(run).payload_bytes, int(block["local"][0])) == (operation, payload, local)


def test_what_the_trace_does_not_state_is_missing(tmp_path: Path) -> None:
    trace = KinetoFactory().event("cpu_op", "c10d::allreduce_", 100, 50).event("cpu_op", "c10d::allreduce_", 200, 50)
    run = imported(tmp_path, trace.call(300))
    events = run.events()
    assert events["payload_bytes"].isna().tolist() == [True, True, False]
    assert events["wire_bytes"].isna().tolist() == [True, True, False]
    volume = run.table("volume_by_operation")
    assert pd.isna(volume["payload_bytes"].iloc[0])
    assert pd.isna(volume["payload_share"].iloc[0])
    assert int(volume["calls"].iloc[0]) == 3
    assert run.table("message_sizes")["payload_bytes"].tolist() == [4000]


def test_a_cut_list_of_ranks_is_rebuilt_from_its_start_and_stride(tmp_path: Path) -> None:
    cut: dict[str, Any] = {"Process Group Ranks": "[0, 2, 4, ...]", "Process Group Name": "5", "Group size": 64}
    strided: dict[str, Any] = {"Global rank start": 0, "Global rank stride": 2}
    trace = KinetoFactory(world_size=128).call(100, **cut, **strided)
    assert only_call(imported(tmp_path, trace)).group_ranks == ",".join(map(str, range(0, 128, 2)))


def test_a_cut_list_of_splits_leaves_the_wire_bytes_unknown(tmp_path: Path) -> None:
    comms = stated("all_to_allv", **{"In split size": "[1, 3, ...]"})
    call = only_call(imported(tmp_path, KinetoFactory().call(100, operator="alltoall_base_", **comms)))
    assert call.payload_bytes == 4000
    assert np.isnan(call.wire_bytes)


def test_waits_and_parts_of_a_call_are_not_calls(tmp_path: Path) -> None:
    trace = KinetoFactory().call(100, operator="allgather_", **stated("all_gather", **{"Out msg nelems": 2000}))
    trace.event("cpu_op", "record_param_comms", 110, 5, **stated("_broadcast_oop"))
    trace.event("cpu_op", "record_param_comms", 200, 5, **stated("wait"))
    assert only_call(imported(tmp_path, trace)).op == "all_gather"


def test_a_kernel_at_the_end_of_a_group_belongs_to_all_its_calls(tmp_path: Path) -> None:
    trace = KinetoFactory()
    trace.call(100, operator="send", concrete=["", "", "1", "7"], **stated("send"))
    trace.call(200, operator="recv_", concrete=["", "", "1", "7"], **stated("recv"))
    trace.kernel(400, 25, SEND_RECV_KERNEL, launched=300)
    run = imported(tmp_path, trace)
    events = run.events()
    assert events["op"].tolist() == ["send", "recv"]
    assert events["peer"].tolist() == [1, 1]
    assert events["tag"].tolist() == [7, 7]
    assert (events["t_end_ns"] - events["t_start_ns"]).tolist() == [25_000, 25_000]
    assert all("coalesced" in flags for flags in events["flags"])


@pytest.mark.parametrize(
    ("kernel", "operation"),
    [
        ("void deep_ep::internode::dispatch<false, 8>(int4*)", "all_to_all"),
        ("void dpsk::ep::internode::combine<false, 8>(int4*)", "all_to_all"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(int)", "all_reduce"),
        (SEND_RECV_KERNEL, "unknown"),
    ],
)
def test_kernels_without_a_call_of_the_host_are_told_by_their_names(
    tmp_path: Path, kernel: str, operation: str
) -> None:
    trace = KinetoFactory().kernel(400, 25, kernel, launched=300, launcher="cudaGraphLaunch")
    run = imported(tmp_path, trace)
    call = only_call(run)
    assert (call.op, call.api, call.group_ranks) == (operation, "kernel", "unknown")
    assert pd.isna(call.payload_bytes)
    assert "captured" in call.flags
    assert any("1 of its communication kernels" in text for text in run.table("blind_spots")["blind_spot"])
    assert int(Flag.CAPTURED) == 4


def test_call_sites_phases_and_purposes(tmp_path: Path) -> None:
    trace = KinetoFactory()
    for name, begin in (("train.py(10): main", 0), ("torch/autograd/graph.py(5): _engine_run_backward", 10)):
        trace.event("python_function", name, begin, 900 - begin)
    trace.event("cpu_op", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 90, 100, 2)
    run = imported(tmp_path, trace.call(100, tid=2))
    call = only_call(run)
    assert (call.site, call.phase, call.purpose) == ("train.py:10 main", "backward", "gradients reduced")


@pytest.mark.parametrize(
    ("around", "autograd", "purpose", "module"),
    [
        (["pre_forward (layers.0)", "all_gather (layers.0)"], False, "parameters gathered for forward", "layers.0"),
        (["all_gather (layers.0)"], False, "parameters gathered for forward", "layers.0"),
        (["pre_forward", "all_gather"], False, "parameters gathered for forward", None),
        (
            ["pre_backward (layers.1)", "backward_prefetch for layers.0", "all_gather (layers.0)"],
            True, "parameters gathered for backward", "layers.0",
        ),
        (["all_gather (layers.0)"], True, "parameters gathered for backward", "layers.0"),
        (["pre_forward (layers.0)", "all_gather (layers.0)"], True, Purpose.PARAMETERS_RECOMPUTATION.value, "layers.0"),
        (["post_backward_reduce (layers.0)"], True, "gradients reduced", "layers.0"),
    ],
)  # fmt: skip
def test_annotations_of_fsdp_tell_purpose_and_unit(
    around: list[str], autograd: bool, purpose: str, module: str | None, tmp_path: Path
) -> None:
    trace = KinetoFactory()
    if autograd:
        trace.event("cpu_op", "autograd::engine::evaluate_function: RegisterPostBackwardFunctionBackward", 5, 500)
    for number, name in enumerate(around):
        trace.event("user_annotation", f"FSDP::{name}", 10 + number, 300 - number)
    run = imported(tmp_path, trace.call(100, operator="_allgather_base_"))
    assert only_call(run).purpose == purpose
    (site,) = run.processes[0].tables.sites.values()
    assert site.purpose is not None
    assert dict(site.purpose.facts).get("module") == module


def test_other_work_of_the_device_is_kept_as_unions(tmp_path: Path) -> None:
    trace = KinetoFactory().step(0, 0, 900).call(100, kernels=((200, 30),))
    trace.kernel(100, 50, "gemm").kernel(120, 50, "gemm", stream=9).kernel(300, 10, "relu")
    run = imported(tmp_path, trace.event("gpu_memcpy", "Memcpy HtoD", 500, 5, 1007))
    rows = read_work(run.processes[0].device or Path())
    lengths = {kind: np.diff(spans_of(rows, kind), axis=1).ravel().tolist() for kind in Work}
    assert lengths == {Work.COMPUTATION: [70_000, 10_000], Work.COPY: [5_000], Work.STEP: [900_000]}


def test_ranks_whose_files_begin_at_different_steps_match(tmp_path: Path) -> None:
    early = KinetoFactory(0).step(1, 0, 100).call(10).call(60).step(2, 100, 100).call(110).call(160)
    late = KinetoFactory(1).step(2, 100, 100).call(110).call(160)
    events = imported(tmp_path, early, late).events()
    assert events.loc[events["rank"] == 0, "seq"].tolist() == [0, 1, 2, 3]
    assert events.loc[events["rank"] == 1, "seq"].tolist() == [2, 3]


def test_several_windows_of_one_rank_are_one_process(tmp_path: Path) -> None:
    windows = [KinetoFactory(0).step(n, 1000 * n, 100).call(1000 * n + 10) for n in range(2)]
    run = imported(tmp_path, *windows)
    assert len(run.processes) == 1
    assert run.events()["step"].tolist() == [0, 1]


def test_the_rank_is_taken_from_the_file_name_else_numbered(tmp_path: Path) -> None:
    run = imported(tmp_path, KinetoFactory(None).call(100), name="run_rank-{}5.json")
    assert run.ranks == [5]
    (tmp_path / "other").mkdir()
    numbered = imported(tmp_path / "other", KinetoFactory(None).call(100), name="trace{}.json")
    assert numbered.ranks == [0]
    assert any("its rank" in text for text in numbered.table("blind_spots")["blind_spot"])


def test_a_cut_trace_is_imported_as_far_as_it_goes(tmp_path: Path) -> None:
    text = KinetoFactory().call(100).call(200).text()
    path = tmp_path / "cut.json"
    path.write_text(text[: text.rindex("record_param_comms")])
    import_files([path], tmp_path / "log")
    run = commtrace.open(tmp_path / "log")
    assert len(run.events()) == 2
    assert run.events()["payload_bytes"].isna().tolist() == [False, True]
    assert [note.kind for note in run.notes] == ["cut"]
    assert run.table("coverage")["files_cut"].iloc[0] == 1


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"traceEvents": []}', b"\x1f\x8b", b'{"traceEvents": [{"ph"'])
def test_a_file_without_calls_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(ImportFileError, match=r"bad\.json"):
        import_files([path], tmp_path / "log")
    assert not (tmp_path / "log").exists()


def test_events_of_wrong_types_are_left_out_and_counted(tmp_path: Path) -> None:
    trace = KinetoFactory().call(100)
    wrong: list[Any] = [7, None, {"cat": "kernel", "name": 5, "ts": {}, "dur": []}, {"cat": "kernel", "ts": "x"}]
    trace.events += [*wrong, {**trace.events[0], "ts": 1e300}, {**trace.events[0], "dur": -5}]
    run = imported(tmp_path, trace)
    assert len(run.events()) == 1
    assert any("4 events" in note.text for note in run.notes)


def test_what_only_an_export_writes_may_be_damaged(tmp_path: Path) -> None:
    damaged: dict[str, Any] = {
        "External id": [1], "Seq": {}, "Rank": [], "commtrace tag": "x", "commtrace flags": 7, "commtrace": {},
    }  # fmt: skip
    trace = KinetoFactory().call(100, operator="send", kernels=((200, 30),), **stated("send", **damaged))
    trace.events[-1]["args"] |= {"commtrace": ["cpu call"], "commtrace clock": [3]}
    trace.event("user_annotation", "commtrace wait", 150, 5).events[-1]["args"]["External id"] = "x"
    trace.event("user_annotation", "commtrace wait", 160, 5)
    run = imported(tmp_path, trace)
    call = only_call(run)
    assert (call.op, call.tag, call.flags, call.t_wait_ns) == ("send", -1, "", 0)
    assert call.t_end_ns - call.t_start_ns == 30_000
    assert any("2 events" in note.text for note in run.notes)


def test_calls_of_unknown_payload_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = KinetoFactory().event("cpu_op", "c10d::allreduce_", 100, 50).write(tmp_path / "a.json")
    assert main(["check", str(trace)]) == 2
    assert main(["diff", str(trace), str(trace)]) == 2
    assert "all_reduce" in capsys.readouterr().err


def test_figures_leave_out_operations_of_unknown_payload(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    trace = KinetoFactory().call(100).event("cpu_op", "c10d::broadcast_", 200, 50)
    figure = commtrace.open(trace.write(tmp_path / "a.json")).figure("volume")
    texts = [text for bars in figure.data for text in (bars.text or ())]
    assert any("3.91 KiB" in text for text in texts)
    assert not any("0 B" in text for text in texts)


def test_a_trace_is_opened_as_a_run(tmp_path: Path) -> None:
    path = KinetoFactory().call(100).write(tmp_path / "trace.json")
    assert len(commtrace.open(path).events()) == 1
