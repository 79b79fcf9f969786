"""Every kind of mpi4py call, by three ranks under each MPI: the log is correct, and results do not change."""

from __future__ import annotations

import ast
import functools
import json
import shutil
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import mpi_launch
import processes
import pytest
from hook_programs.runs import Call, Log

from commtrace.schema import Clock, Flag, State

pytest.importorskip("mpi4py")

CALLS = mpi_launch.PROGRAMS / "calls.py"

RANKS = 3
ASYNC, COALESCED, OBJECT, UNEVEN, NONE = Flag.ASYNC, Flag.COALESCED, Flag.OBJECT, Flag.UNEVEN, Flag(0)


@functools.cache
def traced(mpi: str, recorder: str) -> tuple[list[dict[str, Any]], list[Log]]:
    """Return the results and the log of each rank."""
    folder = Path(tempfile.mkdtemp(prefix="commtrace-mpi"))
    try:
        mpi_launch.succeeds(mpi, "calls", folder / "gave", log=folder / "log", limit=120, COMMTRACE_RECORDER=recorder)
        logs = [Log(left) for left in processes.read_all(folder / "log")]
        return read_results(folder / "gave"), logs
    finally:
        processes.clean_shm(folder)
        shutil.rmtree(folder)


@functools.cache
def untraced(mpi: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        mpi_launch.succeeds(mpi, "calls", Path(folder) / "gave", limit=120)
        return read_results(Path(folder) / "gave")


def read_results(stem: Path) -> list[dict[str, Any]]:
    return [json.loads(Path(f"{stem}.{rank}").read_text()) for rank in range(RANKS)]


@pytest.fixture
def logs(mpi: str, mpi_recorder: str) -> list[Log]:
    return traced(mpi, mpi_recorder)[1]


class Row(NamedTuple):
    """Expected values of a record."""

    op: str
    variant: str
    dtype: str | None
    payload: int
    local: int = 0
    flags: Flag = NONE
    peer: int = -1
    tag: int = -1
    reduce_op: str | None = None
    end: tuple[State, Clock] = (State.COMPLETE, Clock.RETURN)


def row(call: Call) -> Row:
    return Row(
        call.op, call.variant, call.dtype, call.payload, call.local, call.flags, call.peer, call.tag, call.reduce_op,
        (call.state, call.clock),
    )  # fmt: skip


WAITED, POLLED = (State.COMPLETE, Clock.WAIT), (State.COMPLETE, Clock.TEST)
FORGOTTEN, FAILED = (State.UNOBSERVABLE, Clock.NONE), (State.FAILED, Clock.NONE)
F8, F4, I4, I8 = "float64", "float32", "int32", "int64"


def summed(payload: int, dtype: str | None = F8, reduce_op: str = "SUM", **other: Any) -> Row:
    return Row("all_reduce", "Allreduce", dtype, payload, reduce_op=reduce_op, **other)


def sent(payload: int, peer: int, tag: int = 0, variant: str = "Send", dtype: str | None = F8, **other: Any) -> Row:
    return Row("send", variant, dtype, payload, peer=peer, tag=tag, **other)


def received(payload: int, peer: int, tag: int = 0, variant: str = "Recv", dtype: str | None = F8, **other: Any) -> Row:
    return Row("recv", variant, dtype, payload, peer=peer, tag=tag, **other)


BARRIER = Row("barrier", "Barrier", None, 0)


def broadcast(payload: int, dtype: str | None = F8, peer: int = 0) -> Row:
    return Row("broadcast", "Bcast", dtype, payload, peer=peer)


# The same on all ranks.
COMMON: dict[str, list[Row]] = {
    "barrier": [BARRIER],
    "bcast": [broadcast(80, peer=1)],
    "bcast_with_type": [broadcast(24, F4, peer=2)],
    "bcast_forms": [
        broadcast(8, "uint8"), broadcast(8), broadcast(8, "uint8"), broadcast(0, "uint8"),
        broadcast(8, I4), broadcast(8, I4), broadcast(8, I4), broadcast(16, I4),
    ],
    "gather": [Row("gather", "Gather", F8, 3 * 40, 40, peer=1)],
    "gather_in_place": [Row("gather", "Gather", F8, 3 * 16, 16, peer=0)],
    "scatter": [Row("scatter", "Scatter", F4, 3 * 16, 16, peer=2)],
    "allgather": [Row("all_gather", "Allgather", F4, 3 * 20, 20)],
    "allgather_in_place": [Row("all_gather", "Allgather", F4, 3 * 20, 20)],
    "alltoall": [Row("all_to_all", "Alltoall", F8, 3 * 16, 16)],
    "alltoallw": 2 * [Row("all_to_all", "Alltoallw", F8, 3 * 8, 8)],
    "reduce": [Row("reduce", "Reduce", F8, 56, peer=1, reduce_op="MAX")],
    "allreduce": [summed(800)],
    "allreduce_in_place": [summed(200, I4, "PROD")],
    "allreduce_user_defined": [summed(24, reduce_op="user")],
    "reduce_scatter_block": [Row("reduce_scatter", "Reduce_scatter_block", F8, 48, 16, reduce_op="SUM")],
    "reduce_scatter_without_counts": [Row("reduce_scatter", "Reduce_scatter", F8, 48, 16, reduce_op="SUM")],
    "scan": [Row("scan", "Scan", F8, 24, reduce_op="SUM"), Row("exscan", "Exscan", F8, 24, reduce_op="SUM")],
    "derived_type": [broadcast(32, "derived")],
    "to_and_from_nobody": [
        sent(0, -1, dtype=None), received(0, -1, -1, dtype=None),
        sent(0, -1, dtype=None, variant="Sendrecv", flags=COALESCED),
        received(0, -1, -1, dtype=None, variant="Sendrecv", flags=COALESCED),
        sent(0, -1, dtype="object", variant="send", flags=OBJECT),
        received(0, -1, -1, dtype="object", variant="recv", flags=OBJECT),
    ],
    "nonblocking_collectives": [
        Row("all_reduce", "Iallreduce", F8, 40, flags=ASYNC, reduce_op="SUM", end=WAITED),
        Row("all_gather", "Iallgather", F8, 120, 40, flags=ASYNC, end=WAITED),
        Row("barrier", "Ibarrier", None, 0, flags=ASYNC, end=WAITED),
        Row("broadcast", "Ibcast", F8, 16, peer=1, flags=ASYNC, end=WAITED),
    ],
    "object_barrier": [BARRIER._replace(variant="barrier")],
    "duplicate": [BARRIER, BARRIER],
    "alone": [summed(16)],
    "distributed_graph": [
        Row("all_gather", "Neighbor_allgather", F8, 24), Row("all_to_all", "Neighbor_alltoallv", F8, 24),
    ],
    "Traced.Barrier": [BARRIER],
    "subclass": [summed(8)],
    "no_such_root": [broadcast(8, peer=-1)._replace(end=FAILED)],
    "not_a_buffer": [],
    "too_few_arguments": [],
    "freed": [],
    "null": [],
    "cached_method": [summed(8)] * 3,
}  # fmt: skip


def each(make: Any) -> list[list[Row]]:
    """Return the rows of each rank, made by `make(rank, next, previous)`."""
    return [make(rank, (rank + 1) % RANKS, (rank - 1) % RANKS) for rank in range(RANKS)]


# By rank.
EACH: dict[str, list[list[Row]]] = {
    "gatherv": each(
        lambda rank, *_: [
            Row("gather", "Gatherv", F8, 48 if rank == 0 else 8 * (rank + 1), 8 * (rank + 1), UNEVEN, 0)
        ]
    ),
    "scatterv": each(
        lambda rank, *_: [
            Row("scatter", "Scatterv", F8, 48 if rank == 0 else 8 * (rank + 1), 8 * (rank + 1), UNEVEN, 0)
        ]
    ),
    "allgatherv": each(lambda rank, *_: [Row("all_gather", "Allgatherv", I8, 48, 16 * rank, UNEVEN)]),
    "alltoallv": each(lambda rank, *_: [Row("all_to_all", "Alltoallv", F8, 48, 8 * (rank + 1), UNEVEN)]),
    "reduce_scatter": each(
        lambda rank, *_: [Row("reduce_scatter", "Reduce_scatter", F8, 48, 8 * (rank + 1), UNEVEN, reduce_op="SUM")]
    ),
    "send_and_recv": [[sent(64, 1, 5)], [received(64, 0, 5)], []],
    "recv_less_than_expected_from_anybody": [
        [received(24, 2, 9)], [], [sent(24, 0, 9, "Ssend")],
    ],
    "sendrecv": each(
        lambda rank, after, before: [
            sent(32, after, 3, "Sendrecv", flags=COALESCED), received(32, before, 3, "Sendrecv", flags=COALESCED),
        ]
    ),
    "isendrecv": each(
        lambda rank, after, before: [
            row
            for size in (16, 32)
            for row in (
                sent(size, after, 3, "Isendrecv", flags=COALESCED | ASYNC, end=WAITED),
                received(size, before, 3, "Isendrecv", flags=COALESCED | ASYNC, end=WAITED),
            )
        ]
    ),
    "sendrecv_replace": each(
        lambda rank, after, before: [
            sent(16, after, 0, "Sendrecv_replace", F4, flags=COALESCED),
            received(16, before, 0, "Sendrecv_replace", F4, flags=COALESCED),
        ]
    ),
    "isend_and_irecv": each(
        lambda rank, after, before: [
            received(32, before, 1, "Irecv", flags=ASYNC, end=WAITED),
            sent(32, after, 1, "Isend", flags=ASYNC, end=WAITED),
        ]
    ),
    "irecv_from_anybody": each(
        lambda rank, after, before: [
            received(32, before, 7, "Irecv", flags=ASYNC, end=WAITED),
            sent(32, after, 7, "Issend", flags=ASYNC, end=WAITED),
        ]
    ),
    "polled": each(
        lambda rank, after, before: [
            received(32, before, 2, "Irecv", flags=ASYNC, end=POLLED),
            sent(32, after, 2, "Isend", flags=ASYNC, end=POLLED),
        ]
    ),
    "waits_of_several": each(
        lambda rank, after, before: [
            *(received(16, before, tag, "Irecv", flags=ASYNC, end=WAITED) for tag in range(4)),
            *(sent(16, after, tag, "Isend", flags=ASYNC, end=POLLED) for tag in range(4)),
        ]
    ),
    "forgotten": each(
        lambda rank, after, before: [
            sent(8, after, 77, "Isend", flags=ASYNC, end=FORGOTTEN), received(8, before, 77),
        ]
    ),
    "cancelled": each(
        lambda rank, after, before: [received(0, before, 999, "Irecv", flags=ASYNC, end=FORGOTTEN)]
    ),
    "persistent": each(
        lambda rank, after, before: [
            received(24, before, 4, "Recv_init", flags=ASYNC, end=WAITED),
            sent(24, after, 4, "Send_init", flags=ASYNC, end=WAITED),
        ] * 3
    ),
    "split": each(
        lambda rank, *_: [
            Row("all_reduce", "Allreduce", F8, 16, reduce_op="SUM"),
            *([broadcast(16, peer=2)] if rank % 2 == 0 else []),
        ]
    ),
    "fenced": each(
        lambda rank, after, before: [
            Row("barrier", "Fence", None, 0),
            Row("put", "Put", F8, 16, peer=after, end=WAITED),
            Row("barrier", "Fence", None, 0),
            Row("get", "Get", F8, 24, peer=before, end=WAITED),
            Row("accumulate", "Accumulate", F8, 8, peer=after, reduce_op="SUM", end=WAITED),
            Row("barrier", "Fence", None, 0),
        ]
    ),
    "locked": each(
        lambda rank, *_: [
            BARRIER,
            Row("accumulate", "Fetch_and_op", F8, 8, peer=0, reduce_op="SUM", end=WAITED),
            BARRIER,
            Row("get", "Rget", F8, 8, peer=0, flags=ASYNC, end=WAITED),
            BARRIER,
        ]
    ),
    "truncated": each(
        lambda rank, *_: [
            sent(32, rank, 21, "Isend", flags=ASYNC, end=FORGOTTEN), received(8, rank, 21, end=FAILED),
        ]
    ),
    "mismatch": each(lambda rank, *_: [summed(8, end=FAILED)]),
    "no_such_rank": each(lambda rank, *_: [sent(8, -1, end=FAILED)]),
}  # fmt: skip


def calls_of_case(log: Log, name: str) -> list[Call]:
    """Return the calls of a case in call order, found by line: Python 3.10 has no qualified names."""
    *classes, function = name.split(".")
    body: Sequence[ast.stmt] = ast.parse(CALLS.read_text()).body
    for wanted in (*classes, function):
        nodes = (node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == wanted)
        case = next(nodes)
        body = case.body
    lines = range(case.lineno, (case.end_lineno or case.lineno) + 1)
    return [call for call in log.calls if call.file == str(CALLS) and call.line in lines]


# mpi4py before 4.0 does not have this method.
ABSENT = {"isendrecv"} if int(metadata.version("mpi4py").split(".")[0]) < 4 else set()


@pytest.mark.parametrize("name", [name for name in (*COMMON, *EACH) if name not in ABSENT])
def test_record(logs: list[Log], name: str) -> None:
    for rank, log in enumerate(logs):
        expected = COMMON[name] if name in COMMON else EACH[name][rank]
        assert [row(call) for call in calls_of_case(log, name)] == expected, f"rank {rank}"


def test_the_log_names_who_recorded(logs: list[Log], mpi_recorder: str) -> None:
    assert {log.tables["process"][0]["recorder"] for log in logs} == {mpi_recorder}


def test_nothing_failed_or_was_lost(logs: list[Log]) -> None:
    assert len(logs) == RANKS
    for rank, log in enumerate(logs):
        process = log.tables["process"][0]
        assert (process["rank"], process["world_size"]) == (rank, RANKS)
        assert log.stats["hook_errors"] == 0, log.stats["first_error"]
        assert log.stats["dropped"] == log.stats["lost"] == 0
        assert log.tables["end"]


def test_both_sides_of_a_message_have_the_same_number(logs: list[Log]) -> None:
    def messages(op: str) -> dict[tuple[Any, ...], int]:
        payloads: dict[tuple[Any, ...], int] = {}
        for rank, log in enumerate(logs):
            for call in log.calls:
                if call.op == op and call.peer >= 0 and call.state is State.COMPLETE and "init" not in call.variant:
                    ends = (rank, call.peer) if op == "send" else (call.peer, rank)
                    key = (tuple(call.ranks), call.group["name"], call.group["index"], *ends, call.tag, call.seq)
                    assert key not in payloads, key
                    payloads[key] = call.payload
        return payloads

    sent_, received_ = messages("send"), messages("recv")
    unmatched = {key[-2] for key in set(received_) - set(sent_)}
    assert unmatched <= {21, 77}, unmatched  # tags of sends without an observed end
    assert all(sent_[key] == received_[key] for key in set(sent_) & set(received_))


def test_objects_have_their_pickled_size(logs: list[Log]) -> None:
    import pickle

    def size(item: Any) -> int:
        return len(pickle.dumps(item, pickle.HIGHEST_PROTOCOL))

    def payloads(name: str) -> list[list[tuple[str, int, int]]]:
        return [[(call.op, call.payload, call.local) for call in calls_of_case(log, name)] for log in logs]

    message_size = size({"rank": 0, "text": ""})
    assert payloads("objects") == [[("send", message_size, 0)], [("recv", message_size, 0)], []]
    broadcast_size = size({"a": "y" * 100})
    assert payloads("object_bcast") == [[("broadcast", broadcast_size, 0)]] * RANKS
    own = [size("z" * (10 + rank)) for rank in range(RANKS)]
    assert payloads("object_gather") == [
        [("gather", own[0], own[0])], [("gather", own[1], own[1])], [("gather", sum(own), own[2])],
    ]  # fmt: skip
    own = [size("s" * (20 + rank)) for rank in range(RANKS)]
    assert payloads("object_scatter") == [
        [("scatter", sum(own), own[0])], [("scatter", own[1], own[1])], [("scatter", own[2], own[2])],
    ]  # fmt: skip
    own = [size("a" * (5 + rank)) for rank in range(RANKS)]
    assert payloads("object_allgather") == [[("all_gather", sum(own), own[rank])] for rank in range(RANKS)]
    own = [size("b" * (rank + 1)) for rank in range(RANKS)]
    assert payloads("object_alltoall") == [[("all_to_all", sum(own), own[rank])] for rank in range(RANKS)]
    assert payloads("objects_exchanged") == [
        [("send", size([rank] * rank), 0), ("recv", size([(rank - 1) % RANKS] * ((rank - 1) % RANKS)), 0)]
        for rank in range(RANKS)
    ]
    assert [[op for op, *_ in calls] for calls in payloads("object_reductions")] == [
        ["all_reduce", "reduce", "scan", "exscan"]
    ] * RANKS


def test_objects_in_requests(logs: list[Log]) -> None:
    import pickle

    for rank, log in enumerate(logs):
        calls = calls_of_case(log, "objects_in_requests")
        previous = (rank - 1) % RANKS
        sizes = [len(pickle.dumps({"tag": tag, "from": previous}, pickle.HIGHEST_PROTOCOL)) for tag in range(3)]
        assert [(call.op, call.payload) for call in calls[:3]] == [("recv", size) for size in sizes]
        assert all(call.flags == ASYNC | OBJECT for call in calls)
        assert all((call.state, call.clock) == WAITED for call in calls)


def test_matched_messages_have_their_sender(logs: list[Log]) -> None:
    for rank, log in enumerate(logs):
        calls = [call for call in calls_of_case(log, "matched") if call.op == "recv"]
        previous = (rank - 1) % RANKS
        assert [(call.variant, call.peer, call.tag) for call in calls] == [
            ("Message.Recv", previous, 6), ("Message.recv", previous, 8), ("Message.Irecv", previous, 9),
        ]  # fmt: skip
        assert [call.payload for call in calls][::2] == [32, 16]


def test_an_intercommunicator_has_both_sides(logs: list[Log]) -> None:
    for rank, log in enumerate(logs):
        calls = calls_of_case(log, "between_groups")
        assert [call.op for call in calls] == [
            "all_reduce", "all_gather", "broadcast", *[["send"], [], ["recv"]][rank], "broadcast", "barrier",
        ]  # fmt: skip
        assert all(call.ranks == [0, 1, 2] for call in calls[:-1])
        assert [call.peer for call in calls if call.op in ("send", "recv")] == [[2], [], [0]][rank]
        assert calls[2].peer == 0
        assert calls[1].payload == 16 * (2 if rank == 0 else 1)


def test_a_cartesian_communicator(logs: list[Log]) -> None:
    for rank, log in enumerate(logs):
        calls = calls_of_case(log, "cartesian")
        assert calls[0].group["desc"] == "Cartesian"
        assert [(call.op, call.variant) for call in calls] == [
            ("all_gather", "Neighbor_allgather"), ("all_to_all", "Neighbor_alltoall"),
            ("send", "Sendrecv_replace"), ("recv", "Sendrecv_replace"),
            ("all_gather", "neighbor_allgather"), ("all_gather", "Ineighbor_allgather"),
        ]  # fmt: skip
        assert [call.payload for call in calls[:4]] == [32, 32, 32, 32]
        assert {call.peer for call in calls[2:4]} == {(rank + 1) % RANKS, (rank - 1) % RANKS}


def test_threads_are_told_apart(logs: list[Log]) -> None:
    for log in logs:
        calls = [call for call in log.calls if call.function.endswith("work")]
        if calls:  # if this MPI supports threads
            assert len(calls) == 100
            assert len({call.thread for call in calls}) == 2
            assert all(
                sorted(c.seq for c in calls if c.group == group) == list(range(50)) for group in (calls[0].group,)
            )


def test_groups(logs: list[Log]) -> None:
    for log in logs:
        names = [(row["ranks"], row["name"], row["index"]) for row in log.tables["groups"]]
        assert len(names) == len({*names})
        assert ("0-2", "MPI_COMM_WORLD", 0) in names
        assert ("0-2", "of mine", 0) in names


def test_results_are_as_without_tracing(mpi: str, mpi_recorder: str) -> None:
    assert untraced(mpi) == traced(mpi, mpi_recorder)[0]
