"""Imports of files of the NCCL Inspector: each version and property of the format, in small files with known calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspector_files import BASE_US, InspectorFile

import commtrace
from commtrace.cli import main
from commtrace.errors import CommtraceError, ImportFileError
from commtrace.importing.import_run import import_files


def imported(tmp_path: Path, *files: InspectorFile, suffix: str = ".log") -> commtrace.Run:
    folder = tmp_path / "files"
    folder.mkdir(exist_ok=True)
    for file in files:
        file.write(folder, suffix)
    import_files([folder], tmp_path / "log")
    return commtrace.open(tmp_path / "log")


def blind_spots(run: commtrace.Run) -> str:
    return "\n".join(run.table("blind_spots")["blind_spot"])


def volumes(run: commtrace.Run) -> dict[str, tuple[int, float]]:
    """Return the number of calls and the payload by operation."""
    table = run.table("volume_by_operation")
    rows: Any = table.itertuples()
    return {row.op: (row.calls, row.payload_bytes) for row in rows}


@pytest.mark.parametrize("version", ["v4.0", "v4.2", "v4.3"])
@pytest.mark.parametrize("suffix", [".log", ".jsonl.gz"])
def test_every_version_has_the_same_calls(tmp_path: Path, version: str, suffix: str) -> None:
    files = [InspectorFile(rank, version=version).call(us=100).call(us=300) for rank in range(2)]
    run = imported(tmp_path, *files, suffix=suffix)
    assert run.ranks == [0, 1]
    assert run.world_size == 2
    row: Any
    (row,) = run.table("bandwidth").itertuples()
    assert (row.op, row.end_seen_by, row.calls, row.time_ns) == ("all_reduce", "device", 4, 800_000)
    assert row.busbw_gb_per_s == pytest.approx(4 * (1 << 20) / 800_000)


def test_sizes_follow_the_conventions_of_nccl_tests(tmp_path: Path) -> None:
    file = InspectorFile(0, 4)
    for name in ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce"):
        file.call(name, 1000)
    assert volumes(imported(tmp_path, file)) == {
        "all_reduce": (1, 1000), "all_gather": (1, 4000), "reduce_scatter": (1, 4000), "broadcast": (1, 1000),
        "reduce": (1, 1000),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "size", "us", "algbw", "busbw"),
    [
        ("AllReduce", 17179869184, 61974, 277.210914, 485.119099),
        ("ReduceScatter", 2147483648, 41057, 418.439467, 366.134533),
    ],
)
def test_bandwidths_are_those_of_the_examples_in_its_documentation(
    tmp_path: Path, name: str, size: int, us: int, algbw: float, busbw: float
) -> None:
    row: Any
    (row,) = imported(tmp_path, InspectorFile(2, 8).call(name, size, us)).table("bandwidth").itertuples()
    assert row.algbw_gb_per_s == pytest.approx(algbw, rel=1e-6)
    assert row.busbw_gb_per_s == pytest.approx(busbw, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "size", "op"),
    [
        ("AllReduce", (1 << 64) - 4096, "all_reduce"),  # uint8, which the Inspector does not know
        ("All2All", 4096, "all_to_all"),
        ("AllGatherV", 4096, "all_gather"),
        ("Invalid", 4096, "unknown"),
    ],
)
def test_sizes_that_the_file_does_not_tell_are_missing(tmp_path: Path, name: str, size: int, op: str) -> None:
    run = imported(tmp_path, InspectorFile(0).call(name, size))
    assert {key: (calls, np.isnan(payload)) for key, (calls, payload) in volumes(run).items()} == {op: (1, True)}
    assert "the payload of 1 of its calls" in blind_spots(run)


def test_a_file_without_moments_has_counts_and_durations_but_no_single_calls(tmp_path: Path) -> None:
    run = imported(tmp_path, InspectorFile(0).call(), InspectorFile(1).call())
    assert run.is_summary
    with pytest.raises(CommtraceError, match="NCCL or RCCL Inspector"):
        run.events()
    assert "NCCL_INSPECTOR_DUMP_VERBOSE=1" in blind_spots(run)
    assert run.table("volume_by_step")["step"].max() == -1
    assert not run.notes


@pytest.mark.parametrize("version", ["v4.2", "v4.3"])
def test_a_verbose_file_has_the_times_of_each_call(tmp_path: Path, version: str) -> None:
    run = imported(tmp_path, InspectorFile(0, version=version, verbose=True).call(us=250, at=1000))
    call: Any
    (call,) = run.events().itertuples(index=False)
    assert call.t_end_ns - call.t_start_ns == 250_000
    assert call.t_start_ns - call.t_begin_ns == 20_000
    assert call.t_return_ns - call.t_begin_ns == 10_000
    facts = run.processes[0].tables.process
    assert call.t_start_ns + facts["unix_ns"] - facts["mono_ns"] == (BASE_US + 1000) * 1000
    assert (call.variant, call.step) == ("AllReduce", -1)


def test_numbers_are_of_an_operation_and_equal_on_all_ranks(tmp_path: Path) -> None:
    """A rank that has overwritten its first calls does not shift the others."""
    complete = InspectorFile(0, verbose=True)
    for at in range(0, 600, 200):
        complete.call("AllReduce", at=at).call("AllGather", at=at + 100)
    late = InspectorFile(1, verbose=True).call("AllGather", at=300, number=1).call("AllReduce", at=400, number=2)
    events = imported(tmp_path, complete, late.call("AllGather", at=500, number=2)).events()
    numbers = {rank: rows.set_index("seq")["op"].to_dict() for rank, rows in events.groupby("rank")}
    assert len(numbers[0]) == 6
    assert numbers[1].items() <= numbers[0].items()


def test_ranks_of_subgroups_follow_from_the_files_of_all_processes(tmp_path: Path) -> None:
    files = []
    for rank in range(4):
        file = InspectorFile(rank, 4, verbose=True).call(at=0)
        files.append(file.call(at=500, communicator=f"0x{rank % 2}", position=rank // 2, ranks=2))
    events = imported(tmp_path, *files).events()
    assert events["rank"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert events["group_ranks"].tolist() == ["0-3", "0,2", "0-3", "1,3"] * 2


def test_a_group_whose_files_are_not_all_given_is_unknown(tmp_path: Path) -> None:
    file = InspectorFile(2, 4, verbose=True).call(at=0).call(at=500, communicator="0x7", position=1, ranks=2)
    run = imported(tmp_path, file)
    assert run.events()["group_ranks"].tolist() == ["0-3", "unknown"]
    assert run.events()["rank"].tolist() == [2, 2]
    assert "1 of its calls: import the files of all ranks" in blind_spots(run)


def test_without_a_communicator_of_all_ranks_the_ranks_are_numbered(tmp_path: Path) -> None:
    files = [
        InspectorFile(rank, 2).call(communicator=f"0x{rank // 2}", position=rank % 2, ranks=2) for rank in range(4)
    ]
    run = imported(tmp_path, *files)
    assert run.ranks == [0, 1, 2, 3]
    assert run.world_size is None
    assert "its rank: no communicator in the files has all ranks" in blind_spots(run)


def test_a_process_of_several_ranks_has_one_file(tmp_path: Path) -> None:
    file = InspectorFile(0, 2, verbose=True)
    for at in (0, 1000):
        file.call(at=at, position=0, number=at // 1000).call(at=at, position=1, number=at // 1000)
    file.call(at=2000, communicator="0x9", position=0, ranks=1)
    run = imported(tmp_path, file)
    assert run.events()[["rank", "seq"]].to_numpy().tolist() == [[0, 0], [0, 31], [1, 0], [1, 31]]
    assert any("1 calls are of a process with several ranks" in note.text for note in run.notes)


def test_messages_have_their_peers(tmp_path: Path) -> None:
    files = [
        InspectorFile(0, verbose=True).message("Send", 1, at=0).message("Send", 1, at=500),
        InspectorFile(1, verbose=True).message("Recv", 0, at=0).message("Recv", 0, at=500),
    ]
    events = imported(tmp_path, *files).events()
    assert events[["op", "peer", "seq"]].to_numpy().tolist() == [
        ["send", 1, 0], ["send", 1, 1], ["recv", 0, 0], ["recv", 0, 1],
    ]  # fmt: skip


def test_messages_after_overwritten_ones_are_not_matched(tmp_path: Path) -> None:
    file = InspectorFile(0, verbose=True).message("Send", 1, at=0).stats(0, p2p=4).message("Send", 1, at=500)
    run = imported(tmp_path, file, InspectorFile(1, verbose=True).message("Recv", 0, at=0))
    assert run.events()["peer"].tolist() == [1, -1, 0]
    assert "the peers of 1 message after" in blind_spots(run)
    assert "NCCL_INSPECTOR_ENABLE_P2P" not in blind_spots(run)


def test_a_file_without_messages_may_not_have_recorded_them(tmp_path: Path) -> None:
    assert "NCCL_INSPECTOR_ENABLE_P2P=1 records them" in blind_spots(imported(tmp_path, InspectorFile(0).call()))


def test_calls_that_were_overwritten_or_left_out_are_counted(tmp_path: Path) -> None:
    file = InspectorFile(0).call(number=0).stats(3).call(number=10).stats(5)
    run = imported(tmp_path, file)
    coverage = run.table("coverage").iloc[0]
    assert (coverage["records"], coverage["dropped"]) == (2, 5)
    assert not run.notes
    assert "5 calls that the Inspector overwrote" in blind_spots(run)
    assert "4 calls between those in its file" in blind_spots(run)
    assert "8,192 B by default" in blind_spots(run)


@pytest.mark.parametrize("source", ["kernel_cpu", "collective_cpu", "unknown"])
def test_durations_that_the_host_observed_are_lower_bounds_of_bandwidth(tmp_path: Path, source: str) -> None:
    run = imported(tmp_path, InspectorFile(0).call(coll_timing_source=source))
    assert run.table("bandwidth")["end_seen_by"].tolist() == ["poll"]
    assert "the host timed them" in blind_spots(run)


@pytest.mark.parametrize("us", [0, -5, 1e300, "fast", None, float("nan")])
def test_a_duration_that_is_none_is_missing(tmp_path: Path, us: Any) -> None:
    file = InspectorFile(0).call()
    file.lines[0]["coll_perf"]["coll_exec_time_us"] = us
    run = imported(tmp_path, file)
    assert len(run.table("bandwidth")) == 0
    assert volumes(run) == {"all_reduce": (1, 1 << 20)}


def test_a_call_without_its_moments_among_others_is_kept_without_times(tmp_path: Path) -> None:
    file = InspectorFile(0, verbose=True).call(at=0).call(at=500)
    del file.lines[1]["coll_perf"]["event_trace_ts"]["kernel_events"]
    run = imported(tmp_path, file)
    assert sorted(run.events()["t_end_ns"] > 0) == [False, True]
    assert "when 1 of its calls were" in blind_spots(run)


def test_lines_that_are_no_calls_are_left_out_and_counted(tmp_path: Path) -> None:
    file = InspectorFile(0).call()
    file.lines += ["Epoch 1: loss 3.2", '{"coll_perf": {"coll": "AllReduce"}}', "[1]", {**file.context(), "x": 1}]
    run = imported(tmp_path, file.call())
    assert volumes(run)["all_reduce"][0] == 2
    assert [(note.kind, note.text) for note in run.notes] == [
        ("garbled", "4 lines are no call of the Inspector, the first is line 2")
    ]


def test_a_line_of_version_43_without_its_marker_is_no_call(tmp_path: Path) -> None:
    file = InspectorFile(0, version="v4.3").call().call()
    file.lines.append({"coll_perf": file.lines[1]["coll_perf"]})  # beyond the number of the marker
    run = imported(tmp_path, file)
    assert volumes(run)["all_reduce"][0] == 2
    assert len(run.notes) == 1


def test_lines_of_the_proxy_are_no_calls(tmp_path: Path) -> None:
    run = imported(tmp_path, InspectorFile(0, version="v4.3").call().line("proxy_trace", {"record_type": "proxy_op"}))
    assert volumes(run)["all_reduce"][0] == 1
    assert not run.notes


@pytest.mark.parametrize("cut", [1, 12])
def test_a_cut_file_is_imported_as_far_as_it_goes(tmp_path: Path, cut: int) -> None:
    path = InspectorFile(0).call().call().call().write(tmp_path, ".log.gz")
    path.write_bytes(path.read_bytes()[:-cut])
    import_files([path], tmp_path / "log")
    run = commtrace.open(tmp_path / "log")
    assert "cut" in [note.kind for note in run.notes]
    assert volumes(run)["all_reduce"][0] >= 1


@pytest.mark.parametrize("content", [b'{"coll_perf": 7}', b'{"dump_stats": {}}\n', b'{"coll_perf": {"coll": 1}}'])
def test_a_file_without_calls_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.log"
    path.write_bytes(content)
    with pytest.raises(ImportFileError, match=r"bad\.log"):
        import_files([path], tmp_path / "log")
    assert not (tmp_path / "log").exists()


def test_a_network_is_compared_with_verbose_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for rank in range(2):
        file = InspectorFile(rank, verbose=True)
        for at in range(0, 10_000, 1000):
            file.call(us=100 if rank else 130, at=at + 30 * rank)
        files.append(file.call("All2All", at=20_000))  # of unknown payload
    imported(tmp_path, *files)
    assert main(["report", str(tmp_path / "log"), "--network", "slingshot-11", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["tables"]["network"]
    assert (row["op"], row["timed"], row["measured_ns"]) == ("all_reduce", 10, 100_000)
