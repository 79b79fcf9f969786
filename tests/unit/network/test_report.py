"""Runs and forecasts compared with a network: operations have measured times only if the log has transfer times."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from factory import ALL_GATHER, ALONE, RECV, SEND, WORLD, LogFactory, record, training
from networks import ideal, results

import commtrace
from commtrace.analyses.fold_engine import fold
from commtrace.analyses.network_efficiency import is_sampled, network_analysis
from commtrace.cli import main
from commtrace.network.bench_results import write_results
from commtrace.network.networks import MeasuredNetwork, Network
from commtrace.schema import Clock, Flag, State
from commtrace.theory.forecast import PlanOptions
from commtrace.theory.forecast import forecast as forecasted
from commtrace.theory.forecast.predicted_times import num_hosts as hosts_in
from commtrace.theory.forecast.predicted_times import total_time

NETWORK = MeasuredNetwork("it", results([*ideal("all_reduce", 2), *ideal("send_recv", 2)]))


def table(log: Path, network: Network = NETWORK) -> pd.DataFrame:
    run = commtrace.open(log)
    return fold(run, [network_analysis(network)])["network"]


def calls(
    log: Path, *ranks: Sequence[Mapping[str, int]], hosts: tuple[str, ...] = ("node17", "node17"), **known: Any
) -> Path:
    """Write a log with these calls of each rank, and return its path; by default, callbacks observe the ends."""
    factory = LogFactory(log)
    for rank, rows in enumerate(ranks):
        process = factory.process(rank, pid=4711 + rank, host=hosts[rank], world_size=len(ranks))
        process.known({WORLD: [*range(len(ranks))], ALONE: [rank]}, **known)
        process.write([record(**{"clock": Clock.FUTURE, "seq": seq, **row}) for seq, row in enumerate(rows)]).end()
    return log


def span(begin: int, end: int, **fields: int) -> dict[str, int]:
    """Return the fields of a call from `begin` to `end`, in ns."""
    return {"t_begin": begin, "t_return": begin + 1, "t_wait": begin + 1, "t_end": end, **fields}


def one_row(log: Path, **values: Any) -> Any:
    frame = table(log)
    for column, value in values.items():
        frame = frame.loc[frame[column] == value]
    assert len(frame) == 1
    return frame.iloc[0]


def test_a_transfer_is_what_the_last_rank_spends(tmp_path: Path) -> None:
    """Rank 1 enters each of three operations 30 us after rank 0, and its clock is unrelated to that of rank 0."""
    first = [span(start, start + 50_000) for start in (1_000, 100_000, 200_000)]
    last = [
        span(start + 10**9, start + 10**9 + 20_000 + 100 * number)
        for number, start in enumerate((1_000, 100_000, 200_000))
    ]
    row = one_row(calls(tmp_path, first, last))
    assert (row["op"], row["ranks"], row["hosts"], row["payload_bytes"]) == ("all_reduce", 2, 1, 1024)
    assert (row["calls"], row["timed"]) == (6, 3)
    assert row["measured_ns"] == 20_100
    assert row["expected_ns"] == 11_024  # 10 us, and 1,024 bytes at 1 GB/s
    assert row["latency_ns"] == 10_000
    assert row["how"] == "fitted"
    assert row["efficiency"] == pytest.approx(11_024 / 20_100)
    assert row["why_not"] is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"clock": Clock.TEST}, "no operation whose exact end all ranks observed"),
        ({"clock": Clock.DEVICE_WAIT, "t_start": 1_000}, "no operation whose exact end all ranks observed"),
        ({"clock": Clock.WAIT, "flags": Flag.ASYNC}, "no operation whose exact end all ranks observed"),
        ({"clock": Clock.DEVICE}, "no operation whose exact end all ranks observed"),
        (
            {"clock": Clock.NONE, "t_end": 0, "state": State.UNOBSERVABLE},
            "no operation whose exact end all ranks observed",
        ),
        ({"flags": Flag.CAPTURED}, "no operation whose exact end all ranks observed"),
        ({"flags": Flag.SIMULATED}, "no operation whose exact end all ranks observed"),
        ({"flags": Flag.UNEVEN}, "no operation whose exact end all ranks observed"),
        ({"batch": 3, "flags": Flag.COALESCED}, "no operation whose exact end all ranks observed"),
        ({"kind": SEND, "peer": 1}, "a rank may leave it before others enter"),
        ({"kind": RECV, "peer": 1}, "a rank may leave it before others enter"),
        (
            {"kind": ALL_GATHER, "clock": Clock.TEST},
            "the network's file does not describe this operation; no operation whose",
        ),
    ],
)
def test_no_efficiency_without_a_transfer_time(change: dict[str, int], reason: str, tmp_path: Path) -> None:
    """A single record that does not determine the transfer time is enough."""
    same = {key: value for key, value in change.items() if key in ("kind", "peer")}
    row = one_row(calls(tmp_path, [{**span(1_000, 9_000), **change}], [{**span(1_000, 9_000), **same}]))
    assert row["timed"] == 0
    assert pd.isna(row["measured_ns"])
    assert pd.isna(row["efficiency"])
    assert row["why_not"].startswith(reason)


@pytest.mark.parametrize(
    ("clock", "fields"), [(Clock.RETURN, {}), (Clock.WAIT, {}), (Clock.DEVICE, {"t_start": 3_000})]
)
def test_exact_ends(clock: Clock, fields: dict[str, int], tmp_path: Path) -> None:
    row = one_row(calls(tmp_path, *[[{**span(1_000, 9_000), "clock": clock, **fields}]] * 2))
    assert row["measured_ns"] == 9_000 - fields.get("t_start", 1_000)


def test_an_operation_that_not_all_ranks_have_recorded_has_no_time(tmp_path: Path) -> None:
    row = one_row(calls(tmp_path, [span(1_000, 9_000), span(10_000, 19_000)], [span(1_000, 9_000)]))
    assert (row["calls"], row["timed"], row["measured_ns"]) == (3, 1, 8_000)


def test_what_waits_for_another_operation_has_no_time(tmp_path: Path) -> None:
    """On rank 0, the second operation begins before the first has ended; only the third has a time."""
    both = [span(1_000, 90_000), span(10_000, 95_000), span(100_000, 108_000)]
    row = one_row(calls(tmp_path, both, [span(1_000, 9_000), span(10_000, 19_000), span(30_000, 39_000)]))
    assert row["timed"] == 1
    assert row["measured_ns"] == 8_000


def test_behind_a_call_whose_end_nobody_saw_nothing_is_timed_in_its_step(tmp_path: Path) -> None:
    unseen = {**span(1_000, 0), "clock": Clock.NONE, "state": State.UNOBSERVABLE, "step": 0}
    rows = [unseen, span(10_000, 19_000, step=0), span(30_000, 37_000, step=1)]
    row = one_row(calls(tmp_path, rows, rows))
    assert (row["timed"], row["measured_ns"]) == (1, 7_000)


def test_messages_are_within_a_host_or_between_two(tmp_path: Path) -> None:
    network = MeasuredNetwork("it", results([*ideal("send_recv", 2, 1), *ideal("send_recv", 2, 2, gb_per_s=0.5)]))
    send = [
        span(1_000, 9_000, kind=SEND, peer=1, payload=1_000_000),
        span(1_000, 9_000, kind=SEND, peer=2, payload=1_000_000),
    ]
    frame = table(calls(tmp_path, send, [], [], hosts=("a", "a", "b")), network)
    assert [*zip(frame["hosts"], frame["expected_ns"], strict=True)] == [(2, 2_010_000), (1, 1_010_000)]


def test_a_group_with_ranks_that_left_no_log(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    log.process(0, world_size=4).known({WORLD: [0, 1, 2, 3]}).write(record(clock=Clock.FUTURE)).end()
    row = one_row(tmp_path)
    assert pd.isna(row["expected_ns"])
    assert row["why_not"] == "not all ranks of the group left a log"


def test_of_long_runs_the_same_operations_count_on_all_ranks() -> None:
    numbers = np.arange(1 << 20, dtype=np.uint32)
    chosen = numbers[is_sampled(numbers)]
    assert [*chosen[:512]] == [*range(512)]
    for octave in range(9, 20):
        assert ((chosen >= 1 << octave) & (chosen < 2 << octave)).sum() == 256


def test_folds_in_any_cut(tmp_path: Path) -> None:
    rows = [span(number * 10_000, number * 10_000 + 5_000 + number) for number in range(1, 40)]
    uncut = table(calls(tmp_path / "one", rows, rows))
    cut = LogFactory(tmp_path / "two")
    for rank in range(2):
        process = cut.process(rank, pid=4711 + rank).known()
        for begin in range(0, len(rows), 7):
            segment = rows[begin : begin + 7]
            process.write([record(clock=Clock.FUTURE, seq=begin + number, **row) for number, row in enumerate(segment)])
        process.end()
    pd.testing.assert_frame_equal(table(tmp_path / "two"), uncut)


def test_an_empty_run(tmp_path: Path) -> None:
    LogFactory(tmp_path).process(0).known().end()
    assert len(table(tmp_path)) == 0


# ---- commands --------------------------------------------------------------------------------------------------------


@pytest.fixture
def network_file(tmp_path: Path) -> str:
    path = tmp_path / "network.json"
    write_results(results([*ideal("all_reduce", 2), *ideal("barrier", 2)]), path)
    return str(path)


def three_all_reduces(log: Path) -> Path:
    """Write a log of three all_reduces of 4 KiB, which take 49 us each."""
    rows = [span(start, start + 49_000, payload=4096) for start in (1_000, 100_000, 200_000)]
    return calls(log, rows, rows)


def test_the_report_prints_it(network_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    three_all_reduces(tmp_path / "log")
    for width in (80, 160):
        assert main(["report", str(tmp_path / "log"), "--network", network_file, "--width", str(width)]) == 0
        out = capsys.readouterr().out
        section = out[out.index("Compared with the network") :]
        assert "measured: gloo through torch, 2 ranks on 1 host, 2030-01-02." in section
        assert " ".join(
            next(line for line in section.splitlines() if line.startswith("all_reduce")).split()
        ).startswith("all_reduce 2 4.00 KiB 6 3 49.0 us 14.1 us 28.8 %")
        assert max(map(len, out.splitlines())) <= width
    assert main(["report", str(tmp_path / "log")]) == 0
    assert "Compared with the network" not in capsys.readouterr().out


def test_the_report_as_json_and_as_a_page(
    network_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    three_all_reduces(tmp_path / "log")
    assert main(["report", str(tmp_path / "log"), "--network", network_file, "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert tables["network_used"] == [
        {"name": network_file, "about": "measured: gloo through torch, 2 ranks on 1 host, 2030-01-02"}
    ]
    (row,) = [row for row in tables["network"] if row["op"] == "all_reduce"]
    assert (row["measured_ns"], row["expected_ns"], row["efficiency"]) == (
        49_000,
        14_096,
        pytest.approx(14_096 / 49_000),
    )
    pytest.importorskip("plotly")
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "log"), "--network", network_file, "--html", str(page)]) == 0
    assert "Compared with the network" in page.read_text()


def test_a_network_is_for_one_run(network_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training(tmp_path / "log")
    assert main(["report", str(tmp_path / "log"), str(tmp_path / "log"), "--network", network_file]) == 2
    assert "give one directory" in capsys.readouterr().err


def forecast(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["theory", *arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_a_forecast_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """13B under ZeRO-1 on 8 nodes of 8 GPUs: two bytes per parameter, in a ring that uses all NICs of a node."""
    pytest.importorskip("yaml")
    document = forecast(capsys, "13B", "--world-size", "64", "--network", "ndr-infiniband")
    rows = {row["op"]: row for row in document["times"] if row["when"] == "steps from 0"}
    ring = 2 * 13_100_697_600 * 63 / 64 / 400e3  # us at 8 times 50 GB/s
    assert rows["all_gather"]["bandwidth_us"] == pytest.approx(ring, rel=1e-3)
    assert rows["all_reduce"]["bandwidth_us"] == pytest.approx(2 * ring, rel=1e-3)
    assert rows["all_gather"]["latency_us"] == pytest.approx(2 * (3.6 + 56 * 0.47 + 7 * 2.7))
    assert rows["all"]["time_us"] == pytest.approx(rows["all_gather"]["time_us"] + rows["all_reduce"]["time_us"])
    assert {row["how"] for row in document["times"]} == {"described"}
    assert document["network"]["name"] == "ndr-infiniband"


def test_tensor_parallel_ranks_share_a_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "tensor.yml").write_text("model_parallel_size: 8\n")
    document = forecast(
        capsys, "19M", str(tmp_path / "tensor.yml"), "--world-size", "32", "--network", "ndr-infiniband"
    )
    steady = {(row["role"], row["op"]): row for row in document["times"] if row["when"].startswith("steps")}
    volumes = {(row["role"], row["op"]): row for row in document["volumes"] if row["when"].startswith("steps")}
    tensor = ("tensor", "all_reduce")
    assert steady[tensor]["bandwidth_us"] >= volumes[tensor]["wire_bytes"] / 450e3 * 0.999  # NVLink, ring or tree
    assert steady[tensor]["bandwidth_us"] < volumes[tensor]["wire_bytes"] / 450e3 * 8 / 7 * 1.001
    data = ("data", "all_reduce")  # four ranks on four nodes, with one NIC each
    assert steady[data]["bandwidth_us"] == pytest.approx(volumes[data]["wire_bytes"] / 50e3, rel=0.001)


def test_operations_that_were_not_measured_are_counted_and_left_out(
    network_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("yaml")
    document = forecast(capsys, "19M", "--world-size", "2", "--network", network_file)
    rows = {row["op"]: row for row in document["times"] if row["when"] == "steps from 0"}
    assert rows["all_gather"]["time_us"] is None
    assert rows["all_gather"]["calls_without_time"] == rows["all_gather"]["calls"] == 2
    assert rows["all"]["time_us"] == pytest.approx(rows["all_reduce"]["time_us"])
    assert rows["all"]["calls_without_time"] == 2
    assert main(["theory", "19M", "--world-size", "2", "--network", network_file]) == 0
    out = capsys.readouterr().out
    assert "without a time: the network's file has no numbers for their operation" in out
    assert "extrapolated" in out  # 140 MB are more than was measured


def test_a_wrong_network_is_an_error_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml")
    training(tmp_path / "log")
    for command in (["report", str(tmp_path / "log")], ["theory", "19M", "--world-size", "2"]):
        assert main([*command, "--network", "none"]) == 2
        assert capsys.readouterr().err.startswith("commtrace: none: no such file, and no built-in description")


@pytest.mark.parametrize(
    ("keys", "options", "role", "ranks", "hosts"),
    [
        ({}, {}, "data", 32, 4),
        ({"model_parallel_size": 4}, {}, "data", 8, 4),
        ({"context_parallel_size": 4}, {}, "data", 32, 4),  # context-parallel ranks reduce gradients with all others
        ({"sequence_parallel_size": 4}, {}, "sequence", 4, 1),
        ({"fsdp": {"shard_size": 8}}, {"engine": "fsdp"}, "data", 8, 1),
        ({"fsdp": {"shard_size": 8}}, {"engine": "fsdp"}, "data", 4, 4),  # copies
        ({"moe_num_experts": 8, "moe_expert_parallel_size": 8, "moe_min_capacity": 0}, {}, "data", 4, 4),
        ({"pipe_parallel_size": 2, "model_parallel_size": 2}, {}, "model", 4, 2),
    ],
)
def test_hosts_of_the_groups_of_a_forecast(
    keys: dict[str, Any], options: dict[str, Any], role: str, ranks: int, hosts: int, tmp_path: Path
) -> None:
    """The groups of 32 ranks, 8 on each host, span the expected number of hosts."""
    pytest.importorskip("yaml")
    from examples.gpt_neox.theory import register

    register()
    (tmp_path / "keys.yml").write_text(json.dumps(keys))
    predicted = forecasted(["tiny", str(tmp_path / "keys.yml")], 32, PlanOptions(**options))
    host_counts = {
        hosts_in(predicted, call, size, 8)
        for call in (*predicted.prediction.start, *predicted.prediction.step(predicted.prediction.steady))
        for size in [call.ranks or predicted.prediction.ranks_of(call.role)]
        if (call.role, size) == (role, ranks)
    }
    assert host_counts == {hosts}


def test_nothing_known_is_no_time_of_nothing() -> None:
    unknown = {"calls": 2, "calls_without_time": 2, "latency_us": None, "bandwidth_us": None, "time_us": None}
    known = {"calls": 1, "calls_without_time": 0, "latency_us": 1.0, "bandwidth_us": 2.0, "time_us": 3.0}
    assert total_time([{**unknown, "how": None}])["time_us"] is None
    assert total_time([{**unknown, "how": None}, {**known, "how": "fitted"}])["time_us"] == 3.0
