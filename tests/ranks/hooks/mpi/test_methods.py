"""Each recorded method of mpi4py, on each kind of communicator, under each MPI: its records and its results.

A traced program gets the same results as an untraced one, including exceptions and their messages.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mpi_launch
import processes
import pytest
from hook_programs.runs import Call, Log

from commtrace.schema import Clock, Flag, State

pytest.importorskip("mpi4py")

RANKS = 3
DOUBLE = 8


class Ran(NamedTuple):
    """Results and times of one rank's calls, and its log if it is traced."""

    results: dict[str, Any]
    times: dict[str, tuple[int, int]]
    log: Log | None

    def calls(self, name: str) -> list[Call]:
        """Return the records of one call of the program."""
        assert self.log is not None
        return self.log.between(*self.times[name])


@functools.cache
def ran(mpi: str, recorder: str) -> list[Ran]:
    """Return the run of each rank; recorder "" means untraced."""
    folder = Path(tempfile.mkdtemp(prefix="commtrace-mpi"))
    try:
        log = folder / "log" if recorder else None
        mpi_launch.succeeds(mpi, "methods", folder / "gave", log=log, limit=120, COMMTRACE_RECORDER=recorder or "auto")
        logs: list[Any] = [Log(left) for left in processes.read_all(log)] if log else [None] * RANKS
        outputs = [
            [json.loads((folder / f"gave{part}.{rank}").read_text()) for part in ("", ".times")]
            for rank in range(RANKS)
        ]
        return [Ran(results, times, log) for (results, times), log in zip(outputs, logs, strict=True)]
    finally:
        processes.clean_shm(folder)
        shutil.rmtree(folder)


@pytest.fixture
def traced(mpi: str, mpi_recorder: str) -> list[Ran]:
    return ran(mpi, mpi_recorder)


class Place(NamedTuple):
    """One rank's place in a communicator."""

    size: int
    rank: int
    blocks: int
    """Number of shares in a collective's buffer: on an intercommunicator, one for each rank of the remote group."""
    sources: int = 0
    destinations: int = 0
    inter: bool = False
    root: int = 1
    """World rank of the root."""
    members: tuple[int, ...] = (0, 1, 2)


def place(kind: str, rank: int) -> Place:
    """Return a rank's place in a communicator of tests/support/mpi_programs/methods.py."""
    places = {
        "split": Place(3, 2 - rank, 3, members=(2, 1, 0)),
        "two": Place(2, rank, 2, members=(0, 1)),
        "cartesian": Place(3, rank, 3, 2, 2),
        "part": Place(3, rank, 3, 2, 2),
        "graph": Place(3, rank, 3, (1, 2, 1)[rank], (1, 2, 1)[rank]),
        "distributed": Place(3, rank, 3, 1, 1),
        "by_edges": Place(3, rank, 3, 1, 1),
        "between": Place(2, rank, 1, inter=True, root=2) if rank < 2 else Place(1, 0, 2, inter=True, root=2),
    }
    return places.get(kind, Place(3, rank, 3))


class Sizes(NamedTuple):
    """Operation and sizes of a record."""

    op: str
    payload: int
    local: int = 0
    uneven: bool = False


def up_to(count: int) -> list[int]:
    return [DOUBLE * (number + 1) for number in range(count)]


def rooted(base: str, at: Place, rank: int) -> Sizes:
    """Return the sizes of gather or scatter: two numbers for each rank; in the v variants, rank + 1 numbers."""
    op = base.removesuffix("v").lower()
    is_root = at.root == rank
    if base.endswith("v"):
        own = DOUBLE * (at.rank + 1)
        shares = up_to(at.blocks)
        return Sizes(op, sum(shares), 0 if at.inter else own, len(shares) > 1) if is_root else Sizes(op, own, own, True)
    ranks = at.blocks if is_root else at.size
    return Sizes(op, 16 * ranks, 0 if is_root and at.inter else 16)


def sizes(base: str, kind: str, rank: int) -> Sizes:
    """Return the sizes, by hand, of a collective named by its blocking form (docs/reference/log-format.md)."""
    at = place(kind, rank)
    own = 0 if at.inter else 1
    shares = up_to(at.blocks)
    counts = {2: [8, 24], 1: [32], 3: up_to(3)}[at.size]
    scattered = 32 if at.inter else 16 * at.size
    by_form = {
        "Barrier": Sizes("barrier", 0),
        "Bcast": Sizes("broadcast", 16),
        "Allgather": Sizes("all_gather", 16 * at.blocks, 16 * own),
        "Allgatherv": Sizes("all_gather", sum(shares), DOUBLE * (at.rank + 1) * own, at.blocks > 1),
        "Alltoall": Sizes("all_to_all", 16 * at.blocks, 16 * own),
        "Alltoallv": Sizes("all_to_all", sum(shares), DOUBLE * (at.rank + 1) * own, at.blocks > 1),
        "Alltoallw": Sizes("all_to_all", sum(shares), DOUBLE * (at.rank + 1) * own, at.blocks > 1),
        "Reduce": Sizes("reduce", 16),
        "Allreduce": Sizes("all_reduce", 16),
        "Reduce_scatter_block": Sizes("reduce_scatter", scattered, 16 * own),
        "Reduce_scatter": Sizes("reduce_scatter", sum(counts), counts[at.rank % at.size] * own, at.size > 1),
        "Scan": Sizes("scan", 16),
        "Exscan": Sizes("exscan", 16),
        "Neighbor_allgather": Sizes("all_gather", 16 * at.sources),
        "Neighbor_allgatherv": Sizes("all_gather", 16 * at.sources),
        "Neighbor_alltoall": Sizes("all_to_all", 16 * at.destinations),
        "Neighbor_alltoallv": Sizes("all_to_all", 16 * at.destinations),
        "Neighbor_alltoallw": Sizes("all_to_all", 16 * at.destinations),
    }
    return by_form[base] if base in by_form else rooted(base, at, rank)


ROOTED = ("Bcast", "Gather", "Gatherv", "Scatter", "Scatterv", "Reduce")
KINDS = (
    "duplicate", "split", "by_type", "created", "two", "cartesian", "part", "graph", "distributed", "by_edges",
    "between",
)  # fmt: skip
BASES = (
    "Barrier", *ROOTED, "Allgather", "Allgatherv", "Alltoall", "Alltoallv", "Alltoallw", "Allreduce",
    "Reduce_scatter_block", "Reduce_scatter", "Scan", "Exscan", "Neighbor_allgather", "Neighbor_allgatherv",
    "Neighbor_alltoall", "Neighbor_alltoallv", "Neighbor_alltoallw",
)  # fmt: skip


def seen(run: Ran, name: str) -> list[Call]:
    """Return the records of a call; none if it raised an exception because this MPI does not have it."""
    calls = run.calls(name)
    result = run.results[name][0]
    if isinstance(result, list) and len(result) == 2 and str(result[0]).endswith(("Exception", "Error")):
        assert all(call.state is State.FAILED for call in calls), name
        return []
    assert calls, name
    return calls


def collective_rows(run: Ran, rank: int, kind: str, base: str) -> Iterator[tuple[object, object]]:
    """Yield (actual, expected) for each record of the three forms of a collective."""
    at, expected = place(kind, rank), sizes(base, kind, rank)
    for name, again in ((base, 1), (f"I{base.lower()}", 1), (f"{base}_init", 2)):
        if f"{kind}.{name}" not in run.results:
            continue
        calls = seen(run, f"{kind}.{name}")
        end = (State.COMPLETE, Clock.RETURN if name == base else Clock.WAIT)
        flags = (Flag.UNEVEN if expected.uneven else Flag(0)) | (Flag(0) if name == base else Flag.ASYNC)
        peer = at.root if base in ROOTED else -1
        row = (expected.op, name, expected.payload, expected.local, flags, peer, list(at.members), *end)
        for call in calls:
            yield (
                call.op, call.variant, call.payload, call.local, call.flags, call.peer, call.ranks, call.state,
                call.clock,
            ), row  # fmt: skip
        yield len(calls), again if calls else 0


@pytest.mark.parametrize("kind", KINDS)
def test_collectives_of_every_kind_of_communicator(traced: list[Ran], kind: str) -> None:
    compared = 0
    for rank, run in enumerate(traced):
        for base in BASES:
            for actual, wanted in collective_rows(run, rank, kind, base):
                assert actual == wanted, f"rank {rank}: {kind}.{base}"
                compared += 1
    assert compared > 100


OBJECTS = {
    "barrier": "barrier", "bcast": "broadcast", "gather": "gather", "scatter": "scatter", "allgather": "all_gather",
    "alltoall": "all_to_all", "reduce": "reduce", "allreduce": "all_reduce", "scan": "scan", "exscan": "exscan",
    "neighbor_allgather": "all_gather", "neighbor_alltoall": "all_to_all",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_collectives_of_objects(traced: list[Ran], kind: str) -> None:
    for rank, run in enumerate(traced):
        names = [name for name in OBJECTS if f"{kind}.{name}" in run.results]
        assert len(names) >= 8 or rank not in place(kind, rank).members
        for name in names:
            (call,) = seen(run, f"{kind}.{name}")
            assert (call.op, call.variant, call.state) == (OBJECTS[name], name, State.COMPLETE)
            assert bool(call.flags & Flag.OBJECT) == (name != "barrier")
            assert call.ranks == list(place(kind, rank).members)


SENDS = [f"{mode}send" for mode in ("", "b", "s", "r")]
MESSAGES = {
    **{form: ("send", 32) for mode in SENDS for form in (mode.capitalize(), f"I{mode}", f"{mode.capitalize()}_init")},
    **dict.fromkeys(("Recv", "Irecv", "Recv_init", "Message.Recv", "Message.Irecv"), ("recv", 32)),
    **{form: ("send", None) for mode in SENDS[:3] for form in (mode, f"i{mode}")},
    **dict.fromkeys(("recv", "irecv", "Message.recv", "Message.irecv"), ("recv", None)),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(traced: list[Ran], name: str) -> None:
    import pickle

    op, payload = MESSAGES[name]
    for rank, run in enumerate(traced):
        after, before = (rank - 1) % RANKS, (rank + 1) % RANKS  # the communicator reverses the order of ranks
        peer = after if op == "send" else before
        sender = rank if op == "send" else before
        wanted = len(pickle.dumps([sender] * 5, pickle.HIGHEST_PROTOCOL)) if payload is None else payload
        calls = seen(run, f"message.{name}")
        assert [(call.op, call.variant, call.payload, call.peer) for call in calls] == [(op, name, wanted, peer)]
        waited = name[0] == "I" or name.startswith(("i", "Message.I", "Message.i")) or name.endswith("_init")
        assert (calls[0].state, calls[0].clock) == (State.COMPLETE, Clock.WAIT if waited else Clock.RETURN)


@pytest.mark.parametrize("name", ["Sendrecv", "Sendrecv_replace", "Isendrecv", "Isendrecv_replace", "sendrecv"])
def test_exchanges_are_two_messages(traced: list[Ran], name: str) -> None:
    for rank, run in enumerate(traced):
        calls = seen(run, f"message.{name}")
        if calls:
            assert [(call.op, call.variant, call.peer) for call in calls] == [
                ("send", name, (rank - 1) % RANKS), ("recv", name, (rank + 1) % RANKS),
            ]  # fmt: skip
            assert all(call.flags & Flag.COALESCED and call.state is State.COMPLETE for call in calls)
            assert len({call.batch for call in calls}) == 1
            if name != "sendrecv":
                assert [call.payload for call in calls] == [32, 32]


def test_partitioned_messages_are_calls_at_each_start(traced: list[Ran]) -> None:
    for rank, run in enumerate(traced):
        calls = seen(run, "message.Psend_init")
        if calls:
            assert [(call.op, call.variant, call.payload, call.peer) for call in calls] == [
                ("recv", "Precv_init", 48, (rank + 1) % RANKS), ("send", "Psend_init", 48, (rank - 1) % RANKS),
            ] * 2  # fmt: skip
            assert all((call.state, call.clock) == (State.COMPLETE, Clock.WAIT) for call in calls)


ENDS = (
    "Wait", "wait", "Test", "test", "Get_status", "get_status", "Waitany", "waitany", "Testany", "testany",
    "Get_status_any", "get_status_any", "Waitall", "waitall", "Testall", "testall", "Get_status_all", "get_status_all",
    "Waitsome", "waitsome", "Testsome", "testsome", "Get_status_some", "get_status_some",
)  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_each_way_to_see_an_end(traced: list[Ran], name: str) -> None:
    """Both receives began before the call, and it observed their ends."""
    for run in traced:
        begin, end = run.times[f"request.{name}"]
        if run.results[f"request.{name}"][0] is None:
            assert run.log is not None
            calls = [call for call in run.log.calls if call.op == "recv" and begin <= call.t_end < end]
            clock = Clock.WAIT if name.lower().startswith("wait") else Clock.TEST
            both = "status_any" not in name and "status_some" not in name  # these may report the same request twice
            assert len(calls) == 2 or (calls and not both), name
            assert {(call.state, call.clock) for call in calls} == {(State.COMPLETE, clock)}


WINDOWS = {
    "Put": ("put", 16), "Get": ("get", 24), "Accumulate": ("accumulate", 16), "Get_accumulate": ("accumulate", 16),
    "Rput": ("put", 16), "Rget": ("get", 24), "Raccumulate": ("accumulate", 16),
    "Rget_accumulate": ("accumulate", 16), "Fetch_and_op": ("accumulate", 8), "Compare_and_swap": ("accumulate", 8),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_one_sided_operations(traced: list[Ran], name: str) -> None:
    for rank, run in enumerate(traced):
        calls = seen(run, f"window.{name}")
        assert [(call.op, call.variant, call.payload, call.peer) for call in calls] == [
            (WINDOWS[name][0], name, WINDOWS[name][1], (rank + 1) % RANKS)
        ]
        assert (calls[0].state, calls[0].clock) == (State.COMPLETE, Clock.WAIT)
        assert calls[0].group["desc"] == "window"


def test_other_synchronizations_of_windows(traced: list[Ran]) -> None:
    for rank, run in enumerate(traced):
        after = (rank + 1) % RANKS
        assert [(call.op, call.payload) for call in seen(run, "window.Fence")] == [("barrier", 0)]
        (fetch,) = seen(run, "window.fetches")
        assert (fetch.op, fetch.payload, fetch.peer) == ("accumulate", 16, after)
        (put,) = seen(run, "window.started")
        assert (put.op, put.payload, put.peer, put.state) == ("put", 24, after, State.COMPLETE)
        assert put.t_end < run.times["window.started"][1]  # `Complete` comes last in this case


@pytest.mark.parametrize(
    ("name", "payload", "dtype"),
    [
        ("dlpack", 48, "float64"),
        ("dlpack_versioned", 48, "float64"),
        ("dlpack_and_sizes", 48, "float64"),
        ("interface", 48, "float64"),
        ("interface_and_type", 48, "float64"),
        ("dlpack_count_and_type", 24, "float64"),
        ("matrix", 48, "float64"),
        ("scalar", 8, "float64"),
        ("memory", 48, "float64"),
        ("mpi_buffer", 48, "uint8"),
        ("empty", 0, "float64"),
    ],
)
def test_forms_of_buffers(traced: list[Ran], name: str, payload: int, dtype: str) -> None:
    for run in traced:
        (call,) = seen(run, f"buffer.{name}")
        assert (call.op, call.payload, call.dtype, call.state) == ("broadcast", payload, dtype, State.COMPLETE)


def test_nothing_failed_or_was_lost(traced: list[Ran]) -> None:
    for run in traced:
        assert run.log is not None
        assert run.log.stats["hook_errors"] == 0, run.log.stats["first_error"]
        assert run.log.stats["dropped"] == run.log.stats["lost"] == 0


def test_a_program_gets_what_it_gets_untraced(mpi: str, traced: list[Ran]) -> None:
    for rank, (untraced, run) in enumerate(zip(ran(mpi, ""), traced, strict=True)):
        assert set(untraced.results) == set(run.results)
        different = {
            name: (result, run.results[name])
            for name, result in untraced.results.items()
            if result != run.results[name]
        }
        assert not different, f"rank {rank}"


def test_every_method_that_is_recorded_was_called(mpi: str) -> None:
    pytest.importorskip("mpi4py.MPI", exc_type=(ImportError, RuntimeError))  # type: ignore[arg-type]
    from commtrace.hooks.mpi.extension_types import namespace
    from commtrace.hooks.mpi.methods import METHODS
    from commtrace.hooks.mpi.wrappers import COMPLETION_METHODS as KNOWN

    made = {name.partition(".")[2] for name in ran(mpi, "")[0].results}
    made |= {"Precv_init"}  # with Psend_init
    known = {
        f"Message.{method.name}" if method.message_object else method.name
        for method in METHODS
        if method.name in namespace(method.owner)
    }
    assert known - made == set()
    assert set(KNOWN) == set(ENDS)
