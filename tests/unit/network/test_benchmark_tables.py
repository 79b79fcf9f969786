"""Tables of nccl-tests and OMB as results of a network: sizes, ranks, hosts and operations, and what is refused."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from commtrace.cli import main
from commtrace.network import NetworkError
from commtrace.network.bench_results import BenchResults, read_results
from commtrace.network.networks import open_network

HEAD = """#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
FACTORS = {"all_reduce": 1.75, "reduce_scatter": 0.875, "all_gather": 0.875, "alltoall": 0.875, "broadcast": 1.0}
SIZES = (8, 1 << 10, 1 << 20, 1 << 30)


def time_us(size: int) -> float:
    """Return the time of an ideal network: 20 us and 100 GB/s."""
    return 20 + size / 1e5


def devices(ranks: int = 8, hosts: int = 1, groups: int = 1) -> str:
    """Return what nccl-tests prints of its ranks."""
    lines = [
        f"#  Rank {rank % (ranks // groups):2} Group {rank * groups // ranks:2} Pid  {100 + rank} on "
        f"node{rank * hosts // ranks} device {rank % 8:2} [0x07] NVIDIA A100-SXM4-40GB"
        for rank in range(ranks)
    ]
    settings = "# nThread 1 nGpus 1 minBytes 8 maxBytes 1 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1"
    return "\n".join([settings, "#", "# Using devices", *lines]) + "\n"


def nccl(factor: float = 1.75, redop: str = "sum", root: int = -1, wrong: str = "0") -> str:
    """Return a table of nccl-tests."""
    rows = []
    for size in SIZES:
        algbw = size / time_us(size) / 1e3
        half = f"{time_us(size):8.2f} {algbw:7.2f} {algbw * factor:7.2f} {wrong:>6}"
        rows.append(f"{size:12} {size // 4:13} {'float':>9} {redop:>7} {root:7} {half} {half}")
    return HEAD + "\n".join(rows) + "\n# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 41.2\n#\n"


def omb(title: str = "MPI Allreduce", *rows: str, head: str = "# Size       Avg Latency(us)") -> str:
    """Return a table of OMB."""
    return "\n".join([f"# OSU {title} Latency Test v7.3", "# Datatype: MPI_CHAR.", head, *rows, ""])


def read(tmp_path: Path, text: str, name: str = "out.txt") -> BenchResults:
    path = tmp_path / name
    path.write_text(text)
    return read_results(path)


def only(results: BenchResults, field: str) -> Any:
    """Return the value of a field that all rows share."""
    (value,) = {getattr(row, field) for row in results.rows}
    return value


def test_a_table_of_nccl_tests(tmp_path: Path) -> None:
    started = "# Collective test starting: all_reduce_perf\n# nccl-tests version 2.17.9\nNCCL version 2.20.5+cuda12.4\n"
    results = read(tmp_path, started + devices(16, hosts=2) + nccl(1.875))
    assert [row.payload_bytes for row in results.rows] == [*SIZES]
    assert [row.median_us for row in results.rows] == pytest.approx([time_us(size) for size in SIZES], rel=1e-3)
    assert (only(results, "op"), only(results, "ranks"), only(results, "hosts")) == ("all_reduce", 16, 2)
    assert (only(results, "calls"), only(results, "rounds"), only(results, "wrong")) == (20, 1, 0)
    assert results.hosts == [{"host": "node0", "ranks": 8}, {"host": "node1", "ranks": 8}]
    assert results.versions == {"nccl-tests": "2.17.9", "nccl": "2.20.5+cuda12.4"}
    assert results.title == "NCCL through nccl-tests, 16 ranks on 2 hosts"


def nccl_json(ranks: int = 8, hosts: int = 1, factor: float = 1.75, command: str = "./build/all_reduce_perf") -> str:
    """Return what nccl-tests writes with -J."""
    results = []
    for size in SIZES:
        algbw = size / time_us(size) / 1e3
        half = {"time": time_us(size), "alg_bw": algbw, "bus_bw": algbw * factor, "nwrong": 0.0}
        labels = {"type": "float", "redop": "sum", "root": "    -1"}
        results.append({"size": size, "count": size // 4, **labels, "out_of_place": half, "in_place": half})
    members = [
        {"rank": rank, "group": 0, "pid": 100 + rank, "hostname": f"node{rank * hosts // ranks}", "device": rank % 8,
         "device_hex": "0x07", "device_info": "NVIDIA H100 80GB HBM3"}
        for rank in range(ranks)
    ]  # fmt: skip
    head = {"version": 3, "start_time": "2026-11-20 10:00:00", "args": [command, "-J", "out.json"]}
    rest = {"env": ["TOKEN=secret"], "nccl_version": 23004, "config": {"iterations": 20, "devices": members}}
    return json.dumps({**head, **rest, "results": results, "out_of_bounds": {"count": 0, "okay": "true"}})


def test_a_json_file_of_nccl_tests(tmp_path: Path) -> None:
    results = read(tmp_path, nccl_json(16, hosts=2, factor=1.875), "out.json")
    assert [row.payload_bytes for row in results.rows] == [*SIZES]
    assert [row.median_us for row in results.rows] == [time_us(size) for size in SIZES]
    assert (only(results, "op"), only(results, "ranks"), only(results, "hosts")) == ("all_reduce", 16, 2)
    assert (only(results, "calls"), only(results, "wrong")) == (20, 0)
    assert results.hosts == [{"host": "node0", "ranks": 8}, {"host": "node1", "ranks": 8}]
    assert results.versions == {"nccl": "2.30.4"}
    assert "secret" not in repr(results)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (nccl_json()[:-40], "no JSON"),
        (nccl_json().replace('"results"', '"result"'), "KeyError: 'results'"),
        (nccl_json().replace('"time"', '"cpu_time"'), "times of the host"),
        (nccl_json(command="all_gather_perf"), "not those of all_gather"),
    ],
)
def test_json_files_that_cannot_be_used(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(NetworkError, match=problem):
        read(tmp_path, text, "out.json")


def test_lines_of_nccl_between_rows_are_no_rows(tmp_path: Path) -> None:
    table = nccl().splitlines(keepends=True)
    table.insert(6, "3767c65d25c4:880:880 [1] NCCL INFO comm 0x55ba65abd9d0 rank 0 nranks 2\n")
    assert len(read(tmp_path, devices() + "".join(table)).rows) == len(SIZES)


@pytest.mark.parametrize("prefix", ["", "    ", "[1,0]<stdout>:"])
def test_prefixes_of_launchers(tmp_path: Path, prefix: str) -> None:
    text = "".join(f"{prefix}{line}\n" for line in (devices() + nccl()).splitlines())
    assert len(read(tmp_path, text, "all_reduce.txt").rows) == len(SIZES)


@pytest.mark.parametrize(
    ("redop", "root", "factor", "op"),
    [("sum", -1, 1.75, "all_reduce"), ("sum", -1, 0.875, "reduce_scatter"), ("sum", 0, 1.0, "reduce"),
     ("none", 0, 1.0, "broadcast")],
)  # fmt: skip
def test_the_columns_tell_the_operation(tmp_path: Path, redop: str, root: int, factor: float, op: str) -> None:
    assert only(read(tmp_path, devices() + nccl(factor, redop, root)), "op") == op


def test_all_gather_and_alltoall_need_a_name(tmp_path: Path) -> None:
    table = devices() + nccl(0.875, "none")
    with pytest.raises(NetworkError, match=r"out\.txt: line 16: .*into a line before the table"):
        read(tmp_path, table)
    assert only(read(tmp_path, table, "allgather_8.txt"), "op") == "all_gather"
    assert only(read(tmp_path, "$ ./build/alltoall_perf -b 8 -g 8\n" + table), "op") == "all_to_all"
    assert only(read(tmp_path, "# Collective test starting: all_gather_perf\n" + table), "op") == "all_gather"


def test_bandwidths_that_contradict_the_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match="not those of all_gather among 8 ranks"):
        read(tmp_path, devices() + nccl(1.75), "all_gather.txt")


def test_several_tables_in_a_file_and_in_a_directory(tmp_path: Path) -> None:
    both = "all_reduce_perf\n" + devices() + nccl() + "all_gather_perf\n" + devices(4) + nccl(0.75, "none")
    results = read(tmp_path, both)
    assert {(row.op, row.ranks) for row in results.rows} == {("all_reduce", 8), ("all_gather", 4)}
    assert results.hosts == [{"host": "node0", "ranks": 8}]
    (tmp_path / "broadcast.txt").write_text(devices(2) + nccl(1.0, "none", 0))
    (tmp_path / "notes.md").write_text("# Measured on Friday\n")
    assert {fit.op for fit in read_results(tmp_path).fits} == {"all_reduce", "all_gather", "broadcast"}


def test_groups_of_a_split_are_measured_at_once(tmp_path: Path) -> None:
    results = read(tmp_path, devices(8, groups=4) + nccl(1.0), "all_reduce.txt")
    assert only(results, "ranks") == 2


def test_unchecked_values_are_not_correct_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "all_reduce.txt"
    path.write_text(devices() + nccl(wrong="N/A"))
    assert only(read_results(path), "wrong") is None
    assert main(["bench", "--show", str(path), "--width", "160"]) == 0
    assert "N/A" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["sendrecv", "hypercube", "alltoallv"])
def test_operations_that_are_not_predicted_are_left_out(tmp_path: Path, name: str) -> None:
    text = f"# Collective test starting: {name}_perf\n{devices()}{nccl(1.0, 'none')}"
    with pytest.raises(NetworkError, match="with an operation that commtrace predicts"):
        read(tmp_path, text)
    assert (
        only(read(tmp_path, f"{text}# Collective test starting: all_reduce_perf\n{devices()}{nccl()}"), "op")
        == "all_reduce"
    )


def test_ranks_must_be_stated(tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match=r"all_reduce\.txt: line 5: .*# ranks: 8, hosts: 1"):
        read(tmp_path, nccl(), "all_reduce.txt")
    assert only(read(tmp_path, "# ranks: 8, hosts: 1\n" + nccl(), "all_reduce.txt"), "ranks") == 8


@pytest.mark.parametrize(
    ("title", "op", "payload"),
    [
        ("MPI Allreduce", "all_reduce", 64), ("MPI Allgather", "all_gather", 256), ("MPI Alltoall", "all_to_all", 256),
        ("MPI All-to-All Personalized Exchange", "all_to_all", 256), ("MPI Reduce_scatter", "reduce_scatter", 64),
        ("MPI-CUDA Broadcast", "broadcast", 64), ("MPI Reduce", "reduce", 64), ("MPI Gather", "gather", 256),
        ("NCCL Scatter", "scatter", 256),
    ],
)  # fmt: skip
def test_sizes_of_omb_are_payloads(tmp_path: Path, title: str, op: str, payload: int) -> None:
    results = read(tmp_path, f"# ranks: 4, hosts: 2\n{omb(title, '64                      12.50')}")
    assert [(row.op, row.ranks, row.hosts, row.payload_bytes, row.median_us) for row in results.rows] == [
        (op, 4, 2, payload, 12.5)
    ]
    assert results.hosts == [{"host": "host 0", "ranks": 2}, {"host": "host 1", "ranks": 2}]


def test_all_columns_of_omb(tmp_path: Path) -> None:
    head = "# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations"
    text = omb("MPI Allreduce", "4     1.50      1.00      2.50        1000", head=head)
    (row,) = read(tmp_path, f"$ srun -N 2 --ntasks-per-node=8 osu_allreduce -f\n{text}").rows
    assert (row.ranks, row.hosts) == (16, 2)
    assert (row.rank_avg_us, row.rank_min_us, row.rank_max_us, row.calls) == (1.5, 1.0, 2.5, 1000)


def test_messages_and_barriers_of_omb(tmp_path: Path) -> None:
    latency = omb("MPI", "0          1.00", "8          1.25", head="# Size          Latency (us)")
    bandwidth = "# OSU MPI Bandwidth Test v5.6.2\n# Size      Bandwidth (MB/s)\n1000000         5000.00\n"
    barrier = "# OSU MPI Barrier Latency Test v7.3\n# Avg Latency(us)\n             3.50\n"
    other = "# OSU MPI Bi-Directional Bandwidth Test v5.6.2\n# Size      Bandwidth (MB/s)\n1         9.60\n"
    results = read(tmp_path, f"# ranks: 8, hosts: 4\n{latency}{bandwidth}{other}{barrier}")
    assert [(row.op, row.ranks, row.hosts, row.payload_bytes, row.avg_us) for row in results.rows] == [
        ("send_recv", 2, 2, 0, 1.0), ("send_recv", 2, 2, 8, 1.25), ("send_recv_window", 2, 2, 1_000_000, 200.0),
        ("barrier", 8, 4, 0, 3.5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("mpirun -np 16 -npernode 8 osu_allreduce", (16, 2)),
        ("time mpirun --hostfile h -np 64 -map-by ppr:1:node -rank-by core osu_allreduce", (64, 64)),
        ("mpirun -np 8 -N 4 osu_allreduce", (8, 2)),
        ("mpiexec -n 12 -ppn 4 ./osu_allreduce", (12, 3)),
        ("srun -N 2 -n 8 osu_allreduce", (8, 2)),
        ("srun --nodes=4 --ntasks-per-node=4 osu_allreduce", (16, 4)),
        ("mpirun -n 48 osu_allreduce", None),
        ("salloc -n128 -N1", None),
    ],
)
def test_ranks_and_hosts_of_launch_commands(tmp_path: Path, command: str, expected: tuple[int, int] | None) -> None:
    text = f"$ {command}\n\n{omb('MPI Allreduce', '8       1.0')}"
    if expected is None:
        with pytest.raises(NetworkError, match=r"out\.txt: line 6: OMB does not print .*# ranks: 16, hosts: 2"):
            read(tmp_path, text)
        return
    (row,) = read(tmp_path, text).rows
    assert (row.ranks, row.hosts) == expected


@pytest.mark.parametrize(
    "text",
    [
        omb("MPI Allreduce", "8 fast"), omb("MPI Allreduce", "8"), omb("MPI Allreduce", "8.5 1.0"),
        omb("MPI Allreduce", "8 1e99"), devices() + HEAD + "8 2 float sum -1 1.0\n",
        devices() + HEAD + "8 2 float sum -1 x 1 1 0\n", devices() + HEAD + f"{'9' * 30} 2 float sum -1 1 1 1 0\n",
        omb("MPI Allreduce", "8 1.0").replace("# Size", "# ranks: 1, hosts: 9\n# Size"),
    ],
)  # fmt: skip
def test_rows_that_are_none_are_refused_with_their_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(NetworkError, match=r"out\.txt: line \d+: "):
        read(tmp_path, f"# ranks: 4, hosts: 1\n{text}")


@pytest.mark.parametrize("text", [HEAD, devices(), "# OSU MPI Allreduce Latency Test v7.3\n"])
def test_a_benchmark_without_rows_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(NetworkError, match=r"out\.txt: no table"):
        read(tmp_path, text)


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match="no table"):
        open_network(str(tmp_path))


def test_a_network_of_tables_predicts_times(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce.txt"
    path.write_text(devices() + nccl())
    network = open_network(str(path))
    expected = network.expected("all_reduce", 1 << 20, 8, 1)
    assert expected is not None
    assert expected.total_us == pytest.approx(time_us(1 << 20), rel=0.01)
    assert network.expected("all_gather", 1 << 20, 8, 1) is None
    assert network.about == ("measured: NCCL through nccl-tests, 8 ranks on 1 host",)
    assert network.ranks_per_node == 8


def test_theory_takes_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "all_reduce.txt"
    path.write_text(devices() + nccl())
    assert main(["theory", "125M", "--world-size", "8", "--network", str(path), "--json"]) == 0
    assert "nccl-tests" in json.dumps(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("seed", range(60))
def test_damaged_tables_are_refused_or_read_in_part(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    head = "# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations"
    text = f"all_reduce_perf\n{devices()}{nccl()}# ranks: 4, hosts: 2\n{omb('MPI Allgather', '8 1 1 1 9', head=head)}"
    text = nccl_json() if seed % 3 == 0 else text
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(text))
        end = at + draw.choice((1, 5, 80))
        new = draw.choice(("", "9" * 25, "-1", "\n", "# ", "\u0663", "NaN", text[at:end] * 3, " "))
        text = text[:at] + new + text[end:]
    try:
        fits = read(tmp_path, text).fits
    except NetworkError as error:
        assert re.search(r"out\.txt: ", str(error))  # noqa: PT017
        return
    assert all(fit.time_us(1 << 20) >= 0 for fit in fits)
