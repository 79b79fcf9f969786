"""Traces in torch.profiler's format: as it writes them, and imported again as the same calls."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from factory import ALL_GATHER, UNIX_NS, LogFactory, Records, record, training
from kineto_traces import KinetoFactory

from commtrace import cli
from commtrace.analyses.kineto_export import export_kineto
from commtrace.errors import LogError, OutputError
from commtrace.importing.import_run import import_files
from commtrace.importing.kineto_sizes import lengths_of, size_of
from commtrace.operations import MESSAGES, OPERATIONS
from commtrace.run import Run, open_run
from commtrace.schema import Clock, Flag, Phase, State

RANKS = 3
GROUPS = {1: [0, 1, 2], 2: [0, 2], 3: [0, 1, 2]}
TORCH = {
    "all_reduce": "allreduce_", "all_gather": "_allgather_base_", "reduce_scatter": "_reduce_scatter_base_",
    "all_to_all": "alltoall_base_", "broadcast": "broadcast_", "send": "send", "recv": "recv_", "reduce": "reduce_",
    "gather": "gather_", "scatter": "scatter_", "barrier": "barrier",
}  # fmt: skip
"""Operators of torch."""
DTYPES = ("float32", "bfloat16", "int64", "float8_e4m3fn")
SAME = [
    "rank", "op", "group", "group_ranks", "group_size", "dtype", "payload_bytes", "wire_bytes", "peer", "tag", "seq",
    "step", "flags", "state",
]  # fmt: skip
TIMES = ["t_begin_ns", "t_return_ns", "t_wait_ns", "t_start_ns", "t_end_ns"]


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the members of a file and its events."""
    data = path.read_bytes()
    members = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return members, members.pop("traceEvents")


def spans(events: list[dict[str, Any]], category: str, name: str = "") -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") == category and event["name"].startswith(name)]


def import_of(out: Path) -> Run:
    import_files([out], out.with_name(f"{out.name}-imported"))
    return open_run(out.with_name(f"{out.name}-imported"))


def ordered(run: Run) -> pd.DataFrame:
    return run.events().sort_values(["rank", "t_begin_ns", "t_return_ns"], kind="stable", ignore_index=True)


def assert_same(run: Run, other: Run, columns: list[str]) -> None:
    """Assert that the calls of two runs are the same, up to the origin of time."""
    events, others = ordered(run), ordered(other)
    for column in columns:
        assert others[column].astype(str).tolist() == events[column].astype(str).tolist(), column
    shift = others["t_begin_ns"][0] - events["t_begin_ns"][0]
    for column in TIMES:
        assert others[column].tolist() == events[column].where(events[column] == 0, events[column] + shift).tolist()


def random_call(rng: np.random.Generator, rank: int, seq: int, begin: int, kinds: list[dict[str, Any]]) -> Records:
    """Return a call of a random operation that ends in a random way."""
    kind = int(rng.integers(len(kinds)))
    op, group = kinds[kind]["op"], int(rng.choice([1, 2, 3]))
    if rank not in GROUPS[group]:
        group = 1
    members = len(GROUPS[group])
    share = 16 * int(rng.integers(1, 1000))
    payload = 0 if op == "barrier" else share * members
    is_split = op in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
    is_rooted = OPERATIONS[op].is_rooted or op in MESSAGES or OPERATIONS[op].is_one_sided
    peer = int(rng.choice(GROUPS[group])) if is_rooted else -1
    on_device = rng.random() < 0.3
    returned = begin + int(rng.integers(1, 400))
    started = begin + int(rng.integers(0, 500)) if on_device else 0
    end = max(returned, started) + int(rng.integers(0, 3_000))
    times = {"t_begin": begin, "t_return": returned, "t_start": started, "t_end": end, "t_wait": 0}
    clock = Clock.DEVICE if on_device else Clock(int(rng.choice([Clock.RETURN, Clock.WAIT, Clock.FUTURE, Clock.TEST])))
    if clock == Clock.WAIT:
        times["t_wait"] = returned + int(rng.integers(0, end - returned + 1))
    ends: dict[str, int] = {"clock": clock, "state": State.COMPLETE}
    if rng.random() < 0.1:
        ends = {"clock": Clock.NONE, "state": State.UNOBSERVABLE}
        times |= {"t_wait": 0, "t_start": 0, "t_end": 0}
    return record(
        kind=kind + 1, group=group, payload=payload, local=payload // members if is_split else 0, seq=seq, peer=peer,
        tag=int(rng.integers(0, 9)) if op in MESSAGES else -1, step=begin // 20_000 - 1,
        phase=Phase(int(rng.integers(2, 5))), thread=1 + seq % 2, flags=int(rng.choice([0, Flag.ASYNC, Flag.OBJECT])),
        **times, **ends,
    )  # fmt: skip


def random_log(directory: Path, rng: np.random.Generator, api: str, calls: int = 120) -> Run:
    """Write calls of all operations in three groups, two of them with the same ranks."""
    log = LogFactory(directory)
    kinds = [
        {"op": op, "variant": TORCH.get(op, op) if api == "torch" else op.title(), "api": api,
         "dtype": "" if op == "barrier" else str(rng.choice(DTYPES)), "reduce_op": None}
        for op in (TORCH if api == "torch" else OPERATIONS)
    ]  # fmt: skip
    for rank in range(RANKS):
        process = log.process(rank, pid=40 + rank, world_size=RANKS, boot_id="a")
        for number, kind in enumerate(kinds, 1):
            process.add("kinds", id=number, **kind)
        for number, ranks in GROUPS.items():
            if rank in ranks:
                name = "" if api == "mpi" and number == 1 else f"g{number}"
                process.add("groups", id=number, ranks=ranks, name=name, desc="", index=0, backend="gloo")
        begins = np.cumsum(rng.integers(500, 3_000, calls)) + 1_000
        process.write([random_call(rng, rank, seq, int(begin), kinds) for seq, begin in enumerate(begins)]).end()
    return open_run(directory)


@pytest.mark.long
@pytest.mark.parametrize("api", ["torch", "mpi"])
@pytest.mark.parametrize("seed", range(3))
def test_an_import_gives_back_the_calls(tmp_path: Path, seed: int, api: str) -> None:
    run = random_log(tmp_path / "log", np.random.default_rng(seed), api)
    assert export_kineto(run, tmp_path / "traces") == len(run.events())
    again = import_of(tmp_path / "traces")
    assert_same(run, again, SAME)
    assert again.world_size == RANKS
    if api == "torch":
        assert ordered(again)["variant"].tolist() == ordered(run)["variant"].tolist()


def test_each_event_is_as_the_profiler_writes_it(tmp_path: Path) -> None:
    training(tmp_path / "log", ranks=2, steps=2, boot_id="a")
    export_kineto(open_run(tmp_path / "log"), tmp_path / "traces")
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == ["rank0.json.gz", "rank1.json.gz"]
    members, events = read(tmp_path / "traces" / "rank1.json.gz")
    assert members["distributedInfo"]["rank"] == 1
    assert members["distributedInfo"]["world_size"] == 2
    assert members["distributedInfo"]["backend"] == "gloo"
    assert members["distributedInfo"]["pg_config"][0] == {
        "pg_name": "1", "pg_desc": "", "backend_config": "gloo", "pg_size": 2, "ranks": [0, 1],
    }  # fmt: skip
    operators = Counter(event["name"] for event in spans(events, "cpu_op"))
    assert operators == {
        "c10d::barrier": 1, "c10d::allreduce_": 2, "c10d::_allgather_base_": 2, "record_param_comms": 5,
    }  # fmt: skip
    gathers = [event for event in spans(events, "kernel") if event["args"]["Collective name"] == "_allgather_base"]
    assert {event["name"] for event in gathers} == {"ncclKernel_AllGather (gloo, cpu call)"}
    args = gathers[0]["args"]
    assert args == args | {
        "dtype": "Half", "In msg nelems": 512, "Out msg nelems": 1024, "Group size": 2, "Process Group Name": "1",
        "Process Group Ranks": "[0, 1]", "Global rank start": 0, "Global rank stride": 1, "commtrace": "cpu call",
        "commtrace clock": "wait",
    }  # fmt: skip
    assert gathers[0]["dur"] == 50.0
    assert members["baseTimeNanoseconds"] / 1e3 + gathers[0]["ts"] == pytest.approx(UNIX_NS / 1e3 + 999, abs=0.5)
    names = [event["name"] for event in spans(events, "user_annotation")]
    assert Counter(names) == {
        "ProfilerStep#0": 1,
        "ProfilerStep#1": 1,
        "backward": 2,
        "optimizer": 2,
        "commtrace wait": 5,
    }


def test_steps_end_with_their_last_call_and_begin_where_the_one_before_ended(tmp_path: Path) -> None:
    rows = [
        record(seq=seq, step=step, t_begin=begin, t_return=begin + 100, t_wait=begin + 200, t_end=begin + 300)
        for seq, (step, begin) in enumerate(((-1, 5_000), (0, 10_000), (1, 20_000), (3, 40_000)))
    ]
    LogFactory(tmp_path / "log").process(0).known().write(rows).end()
    export_kineto(open_run(tmp_path / "log"), tmp_path / "rank.json")
    _, events = read(tmp_path / "rank.json")
    steps = spans(events, "user_annotation", "ProfilerStep")
    first = steps[0]["ts"]
    shown = [(step["name"], round(step["ts"] - first, 3), step["dur"]) for step in steps]
    assert shown == [("ProfilerStep#0", 0, 0.3), ("ProfilerStep#1", 0.3, 10.0), ("ProfilerStep#3", 30.0, 0.3)]


def test_operations_at_the_same_time_are_on_streams_of_their_own(tmp_path: Path) -> None:
    groups: dict[int, Sequence[int]] = {1: [0, 1], 2: [0, 1]}
    times = ((1, 1_000, 5_000), (1, 2_000, 6_000), (2, 3_000, 4_000), (1, 7_000, 8_000))
    rows = [
        record(seq=seq, group=group, t_begin=begin, t_return=begin + 10, t_wait=0, t_end=end, clock=Clock.FUTURE)
        for seq, (group, begin, end) in enumerate(times)
    ]
    LogFactory(tmp_path / "log").process(0).known(groups).write(rows).end()
    export_kineto(open_run(tmp_path / "log"), tmp_path / "rank.json")
    _, events = read(tmp_path / "rank.json")
    assert [kernel["args"]["stream"] for kernel in spans(events, "kernel")] == [1, 2, 3, 1]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {1: "group 0-1/1", 2: "group 0-1/1", 3: "group 0-1/2"}


def test_long_lists_of_ranks_are_cut_as_by_the_profiler(tmp_path: Path) -> None:
    groups: dict[int, Sequence[int]] = {1: range(0, 80, 2), 2: [*range(30), 100]}
    later = {"t_begin": 20_000, "t_return": 21_000, "t_wait": 0, "t_end": 21_000, "clock": int(Clock.RETURN)}
    rows = [record(seq=0, group=1), record(seq=0, group=2, **later)]
    LogFactory(tmp_path / "log").process(0, world_size=128).known(groups).write(rows).end()
    run = open_run(tmp_path / "log")
    export_kineto(run, tmp_path / "rank.json")
    _, events = read(tmp_path / "rank.json")
    calls = [event["args"] for event in spans(events, "cpu_op", "record_param_comms")]
    assert all(call["Process Group Ranks"].endswith(", ...]") for call in calls)
    assert [(call["Global rank start"], call["Global rank stride"]) for call in calls] == [(0, 2), (0, -1)]
    assert_same(run, import_of(tmp_path / "rank.json"), ["group_ranks", "group", "seq"])


def test_two_calls_of_one_method_stay_two(tmp_path: Path) -> None:
    """MPI_Sendrecv sends and receives at the same time."""
    log = LogFactory(tmp_path / "log")
    both: dict[str, int] = {
        "t_begin": 1_000,
        "t_return": 2_000,
        "t_wait": 0,
        "t_end": 2_000,
        "clock": Clock.RETURN,
        "peer": 1,
        "tag": 0,
    }
    log.process(0).known().write([record(kind=kind, **both) for kind in (3, 4)]).end()
    run = open_run(tmp_path / "log")
    export_kineto(run, tmp_path / "rank.json")
    assert sorted(import_of(tmp_path / "rank.json").events()["op"]) == ["recv", "send"]


def test_what_is_not_known_is_not_invented(tmp_path: Path) -> None:
    process = LogFactory(tmp_path / "log").process(0)
    process.add("kinds", id=1, op="all_to_all", variant="alltoall_base_", api="torch", dtype="float32", reduce_op=None)
    process.add("kinds", id=2, op="all_reduce", variant="allreduce_", api="torch", dtype="", sizes="payload")
    process.add("groups", id=1, ranks=[0, 1], name="0", desc="", index=0, backend="")
    uneven = record(kind=1, payload=400, local=80, flags=Flag.UNEVEN)
    begun = record(kind=2, payload=0, seq=1, t_begin=9_500, t_return=0, t_wait=0, t_end=0, clock=0, state=State.BEGUN)
    captured = record(kind=1, seq=2, t_begin=9_900, flags=Flag.CAPTURED)
    process.write([uneven, begun, captured])
    assert export_kineto(open_run(tmp_path / "log"), tmp_path / "rank.json") == 2
    _, events = read(tmp_path / "rank.json")
    first, second = (event["args"] for event in spans(events, "cpu_op", "record_param_comms"))
    assert (first["Collective name"], first["In msg nelems"], first["Out msg nelems"]) == ("all_to_allv", 100, -1)
    assert first["In split size"] == "[...]"
    assert not {"dtype", "In msg nelems", "Out msg nelems"} & {*second}
    assert second["commtrace"] == "not returned"
    assert [kernel["name"] for kernel in spans(events, "kernel")] == ["ncclKernel_AllToAll (cpu call)"]
    rows = ordered(import_of(tmp_path / "rank.json"))
    assert rows["payload_bytes"].tolist() == [400, pd.NA]
    assert rows["wire_bytes"].isna().all()


def test_the_work_of_an_imported_device_is_written(tmp_path: Path) -> None:
    trace = KinetoFactory().step(3, 0, 900).call(100, kernels=((200.125, 100.5),))
    trace.kernel(250, 30, "gemm", launched=160).kernel(300, 40, "gemm", launched=170)
    trace.event("gpu_memcpy", "Memcpy DtoD", 500, 20, 1007)
    import_files([trace.write(tmp_path / "rank0.json")], tmp_path / "log")
    run = open_run(tmp_path / "log")
    export_kineto(run, tmp_path / "traces")
    _, events = read(tmp_path / "traces" / "rank0.json.gz")
    assert [kernel["name"] for kernel in spans(events, "kernel")] == [
        "ncclKernel_AllReduce",
        "computation",
        "computation",
    ]
    assert [span["dur"] for span in spans(events, "gpu_memcpy")] == [20.0]
    again = import_of(tmp_path / "traces")
    assert_same(run, again, SAME)
    columns = ["computation_ns", "communication_ns", "hidden_ns"]
    rows = [
        side.table("exposed_communication").set_index("step")[columns].to_dict("index")["all"] for side in (run, again)
    ]
    assert rows[0] == rows[1] == {"computation_ns": 70_000, "communication_ns": 100_500, "hidden_ns": 30_625}


def test_ranks_and_steps_are_chosen_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training(tmp_path / "log", ranks=3, steps=5)
    log, out = str(tmp_path / "log"), tmp_path / "traces"
    choice = ["--ranks", "0,2", "--steps", "1-2,4"]
    assert cli.main(["export", log, "--format", "kineto", "--out", str(out), *choice]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["rank0.json.gz", "rank2.json.gz"]
    assert "12 calls" in capsys.readouterr().out
    _, events = read(out / "rank0.json.gz")
    steps = [step["name"] for step in spans(events, "user_annotation", "ProfilerStep")]
    assert steps == ["ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#4"]
    for name in ("one.json", "one.json.gz"):
        assert cli.main(["export", log, "--out", str(tmp_path / name), "--ranks", "1"]) == 0
        assert read(tmp_path / name)[0]["distributedInfo"]["rank"] == 1


def test_errors_name_the_file_and_the_fix(tmp_path: Path) -> None:
    training(tmp_path / "log", ranks=2, steps=1)
    run = open_run(tmp_path / "log")
    with pytest.raises(OutputError, match=r"all\.json: one file cannot hold 2 processes \(ranks 0-1\); name a folder"):
        export_kineto(run, tmp_path / "all.json")
    with pytest.raises(LogError, match=r"no call of these ranks and steps; the run has ranks 0-1"):
        export_kineto(run, tmp_path / "traces", ranks=[7])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").write_text("x")
    with pytest.raises(OutputError, match=r"has no rank\*\.json\.gz, so --force does not replace it"):
        export_kineto(run, tmp_path / "other", force=True)
    LogFactory(tmp_path / "dry").process(0, simulated=True).known().write([record(flags=Flag.SIMULATED)])
    with pytest.raises(LogError, match="a dry run has no times"):
        export_kineto(open_run(tmp_path / "dry"), tmp_path / "traces")
    assert not (tmp_path / "traces").exists()


def test_hosts_are_on_one_clock(tmp_path: Path) -> None:
    log = LogFactory(tmp_path / "log")
    for rank, (host, mono) in enumerate((("node1", 1_000), ("node2", 501_000))):
        process = log.process(rank, pid=rank + 10, host=host, boot_id=host, mono_ns=mono).known()
        process.write([record(kind=ALL_GATHER, t_begin=mono + 50, t_return=mono + 80, t_wait=0, t_end=0, clock=0)])
    export_kineto(open_run(tmp_path / "log"), tmp_path / "traces")
    files = [read(path) for path in sorted((tmp_path / "traces").iterdir())]
    moments = [
        members["baseTimeNanoseconds"] + round(spans(events, "cpu_op")[0]["ts"] * 1000) for members, events in files
    ]
    assert moments == [UNIX_NS + 50, UNIX_NS + 50]


@pytest.mark.parametrize("op", [op for op in OPERATIONS if op != "barrier"])
def test_stated_sizes_are_those_that_the_importer_reads(op: str) -> None:
    local = 100 if op in ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all") else 0
    size = size_of(op, *lengths_of(op, 400, local), [[], []], 4, 0, "float32")
    assert (size.payload, size.local) == (400, local)
