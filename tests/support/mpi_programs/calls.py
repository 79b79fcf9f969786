"""Every kind of mpi4py call, made by three ranks: calls.py FILE [CASE ...] writes the results.

A case is a function. Its return value or exception goes into FILE.RANK as JSON, so that a traced run can be compared
with an untraced one. In the log, the function of a call site is the case's name.
"""

from __future__ import annotations

import array
import inspect
import json
import pickle
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

WORLD: Any = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()
NEXT, LAST = (RANK + 1) % SIZE, (RANK - 1) % SIZE


class Refused(MPI.Datatype):
    """A datatype that MPI names and refuses to describe, as those of Fortran if MPI was built without it."""

    def Get_size(self) -> int:  # noqa: N802 (mpi4py's name)
        raise MPI.Exception(MPI.ERR_TYPE)


library: Any = MPI
library.REFUSED = Refused(MPI.INT)

Case = Callable[[], Any]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def numbers(count: int, dtype: str = "f8", of: int = RANK) -> np.ndarray[Any, Any]:
    return (np.arange(count) + 10 * of).astype(dtype)


# ---- collectives on buffers ------------------------------------------------------------------------------------------


@case
def barrier() -> Any:
    return WORLD.Barrier()


@case
def errors_are_handled_as_before() -> Any:
    return all(comm.Get_errhandler() == MPI.ERRORS_RETURN for comm in (WORLD, MPI.COMM_SELF))


@case
def bcast() -> Any:
    buffer = numbers(10)
    WORLD.Bcast(buffer, root=1)
    return buffer


@case
def bcast_with_type() -> Any:
    buffer = numbers(10, "f4")
    WORLD.Bcast([buffer, 6, MPI.FLOAT], 2)
    return buffer


@case
def bcast_forms() -> Any:
    """The same eight bytes in the forms that mpi4py accepts."""
    found: list[Any] = []
    buffers: list[Any] = [
        bytearray(range(8)),
        array.array("d", [RANK]),
        memoryview(bytearray(8)),
        MPI.memory.fromaddress(0, 0),
    ]
    for buffer in buffers:
        WORLD.Bcast(buffer, 0)
        found.append(bytes(memoryview(buffer)))
    block = numbers(4, "i4")
    WORLD.Bcast([block, (2, 1), MPI.INT], 0)
    WORLD.Bcast([block, (2, 2)], 0)
    WORLD.Bcast((block, 2, 1, "i"), 0)
    WORLD.Bcast([block, "i"], 0)
    return [*found, block]


@case
def gather() -> Any:
    into = np.zeros((SIZE, 5)) if RANK == 1 else None
    WORLD.Gather(numbers(5), into, root=1)
    return into


@case
def gather_in_place() -> Any:
    into = numbers(SIZE * 2)
    WORLD.Gather(MPI.IN_PLACE if RANK == 0 else into[:2], into if RANK == 0 else None, 0)
    return into


@case
def gatherv() -> Any:
    counts = [r + 1 for r in range(SIZE)]
    into = np.zeros(sum(counts)) if RANK == 0 else None
    WORLD.Gatherv(numbers(RANK + 1), [into, counts] if RANK == 0 else None, root=0)
    return into


@case
def scatter() -> Any:
    into = np.zeros(4, "f4")
    WORLD.Scatter(numbers(4 * SIZE, "f4") if RANK == 2 else None, into, root=2)
    return into


@case
def scatterv() -> Any:
    counts = [r + 1 for r in range(SIZE)]
    into = np.zeros(RANK + 1)
    WORLD.Scatterv([numbers(6), counts, [0, 1, 3], MPI.DOUBLE] if RANK == 0 else None, into, root=0)
    return into


@case
def allgather() -> Any:
    into = np.zeros(SIZE * 5, "f4")
    WORLD.Allgather(numbers(5, "f4"), into)
    return into


@case
def allgather_in_place() -> Any:
    into = numbers(SIZE * 5, "f4")
    WORLD.Allgather(MPI.IN_PLACE, [into, 5, MPI.FLOAT])
    return into


@case
def allgatherv() -> Any:
    counts = [2 * r for r in range(SIZE)]
    into = np.zeros(sum(counts), "i8")
    WORLD.Allgatherv(numbers(2 * RANK, "i8"), [into, (counts, None)])
    return into


@case
def alltoall() -> Any:
    into = np.zeros(SIZE * 2)
    WORLD.Alltoall(numbers(SIZE * 2), into)
    return into


@case
def alltoallv() -> Any:
    counts = [r + 1 for r in range(SIZE)]
    into = np.zeros((RANK + 1) * SIZE)
    WORLD.Alltoallv([numbers(sum(counts)), counts], [into, RANK + 1])
    return into


@case
def alltoallw() -> Any:
    given, into = numbers(SIZE), np.zeros(SIZE)
    places = [8 * r for r in range(SIZE)]
    types = [MPI.DOUBLE] * SIZE
    WORLD.Alltoallw([given, ([1] * SIZE, places), types], [into, [1] * SIZE, places, types])
    WORLD.Alltoallw([given, None, None, types], [np.zeros(SIZE), (None, None), types])  # one element each, at the start
    return into


@case
def reduce() -> Any:
    into = np.zeros(7)
    WORLD.Reduce(numbers(7), into if RANK == 1 else None, op=MPI.MAX, root=1)
    return into


@case
def allreduce() -> Any:
    into = np.zeros(100)
    WORLD.Allreduce(numbers(100), into)
    return into


@case
def allreduce_in_place() -> Any:
    into = numbers(50, "i4")
    WORLD.Allreduce(MPI.IN_PLACE, into, MPI.PROD)
    return into


@case
def allreduce_user_defined() -> Any:
    def add(a: Any, b: Any, _: Any) -> None:
        total = np.frombuffer(b, "f8")
        total += np.frombuffer(a, "f8")

    op = MPI.Op.Create(add, commute=True)
    into = np.zeros(3)
    WORLD.Allreduce(numbers(3), into, op)
    op.Free()
    return into


@case
def reduce_scatter_block() -> Any:
    into = np.zeros(2)
    WORLD.Reduce_scatter_block(numbers(2 * SIZE), into)
    return into


@case
def reduce_scatter() -> Any:
    into = np.zeros(RANK + 1)
    WORLD.Reduce_scatter(numbers(6), into, [r + 1 for r in range(SIZE)])
    return into


@case
def reduce_scatter_without_counts() -> Any:
    into = np.zeros(2)
    WORLD.Reduce_scatter(numbers(2 * SIZE), into)
    return into


@case
def scan() -> Any:
    into, before = np.zeros(3), np.zeros(3)
    WORLD.Scan(numbers(3), into)
    WORLD.Exscan(numbers(3), before)
    return [into, before if RANK else None]


@case
def derived_type() -> Any:
    """Every second of eight numbers."""
    column = MPI.DOUBLE.Create_vector(4, 1, 2).Commit()
    buffer = numbers(8)
    WORLD.Bcast([buffer, 1, column], 0)
    column.Free()
    return buffer


# ---- messages --------------------------------------------------------------------------------------------------------


@case
def send_and_recv() -> Any:
    into = np.zeros(8)
    if RANK == 0:
        WORLD.Send(numbers(8), 1, tag=5)
    elif RANK == 1:
        WORLD.Recv(into, 0, 5)
    return into


@case
def recv_less_than_expected_from_anybody() -> Any:
    into = np.zeros(100)
    status = MPI.Status()
    if RANK == 2:
        WORLD.Ssend([numbers(8), 3, MPI.DOUBLE], 0, 9)
    elif RANK == 0:
        WORLD.Recv(into, status=status)
    return [into, status.Get_source(), status.Get_tag(), status.Get_count(MPI.DOUBLE)] if RANK == 0 else None


@case
def sendrecv() -> Any:
    into = np.zeros(4)
    WORLD.Sendrecv(numbers(4), NEXT, 3, into, LAST, 3)
    return into


@case
def sendrecv_replace() -> Any:
    into = numbers(4, "f4")
    WORLD.Sendrecv_replace(into, dest=NEXT, source=LAST)
    return into


@case
def isendrecv() -> Any:
    given = []
    for count in (2, 4):
        into = np.zeros(count)
        WORLD.Isendrecv(numbers(count), NEXT, 3, into, LAST, 3).Wait()
        given.append(into)
    return given


@case
def to_and_from_nobody() -> Any:
    into = numbers(4)
    WORLD.Send(into, MPI.PROC_NULL)
    WORLD.Recv(into, MPI.PROC_NULL)
    WORLD.Sendrecv(into, MPI.PROC_NULL, 0, into, MPI.PROC_NULL)
    WORLD.send("nothing", MPI.PROC_NULL)
    return [into, WORLD.recv(source=MPI.PROC_NULL)]


@case
def isend_and_irecv() -> Any:
    into = np.zeros(4)
    requests = [WORLD.Irecv(into, LAST, 1), WORLD.Isend(numbers(4), NEXT, 1)]
    MPI.Request.Waitall(requests)
    return [into, [bool(request) for request in requests]]


@case
def irecv_from_anybody() -> Any:
    into = np.zeros(40)
    receiving = WORLD.Irecv(into)
    WORLD.Issend(numbers(4), NEXT, 7).Wait()
    status = MPI.Status()
    receiving.Wait(status)
    return [into, status.Get_source(), status.Get_tag()]


@case
def polled() -> Any:
    into = np.zeros(4)
    receiving = WORLD.Irecv(into, LAST, 2)
    sending = WORLD.Isend(numbers(4), NEXT, 2)
    while not receiving.Test():
        pass
    while not sending.Test():
        pass
    return into


@case
def waits_of_several() -> Any:
    into = np.zeros((4, 2))
    receiving = [WORLD.Irecv(into[tag], LAST, tag) for tag in range(4)]
    sending = [WORLD.Isend(numbers(2), NEXT, tag) for tag in range(4)]
    first = MPI.Request.Waitany(receiving)
    indices = MPI.Request.Waitsome(receiving)
    statuses: list[MPI.Status] = []
    MPI.Request.Waitall(receiving, statuses)
    while not MPI.Request.Testall(sending):
        pass
    none = [MPI.Request.Waitany(receiving) == MPI.UNDEFINED, MPI.Request.Testany(sending)[0] == MPI.UNDEFINED]
    return [into, first in range(4), all(n in range(4) for n in indices or []), len(statuses), none]


@case
def objects_in_requests() -> Any:
    receiving = [WORLD.irecv(source=LAST, tag=tag) for tag in range(3)]
    sending = [WORLD.isend({"tag": tag, "from": RANK}, NEXT, tag) for tag in range(3)]
    first = receiving[0].wait()
    others = MPI.Request.waitall(receiving[1:])
    MPI.Request.waitall(sending)
    return [first, others]


@case
def objects_tested() -> Any:
    receiving, sending = WORLD.irecv(source=LAST), WORLD.issend([1, 2, 3], NEXT)
    done, got = receiving.test()
    while not done:
        done, got = receiving.test()
    sending.wait()
    return got


@case
def forgotten() -> Any:
    WORLD.Isend(numbers(1), NEXT, 77)
    into = np.zeros(1)
    WORLD.Recv(into, LAST, 77)
    return into


@case
def cancelled() -> Any:
    into = np.zeros(1)
    request = WORLD.Irecv(into, LAST, 999)
    request.Cancel()
    status = MPI.Status()
    request.Wait(status)
    return status.Is_cancelled()


@case
def persistent() -> Any:
    into, total = np.zeros(3), 0.0
    sending, receiving = WORLD.Send_init(numbers(3), NEXT, 4), WORLD.Recv_init(into, LAST, 4)
    for _ in range(2):
        MPI.Prequest.Startall([receiving, sending])
        MPI.Request.Waitall([receiving, sending])
        total += into.sum()
    receiving.Start()
    sending.Start()
    receiving.Wait()
    sending.Wait()
    sending.Free()
    receiving.Free()
    return total


@case
def matched() -> Any:
    into = np.zeros(4)
    sending = [WORLD.Isend(numbers(4), NEXT, 6), WORLD.isend("matched", NEXT, 8), WORLD.Isend(numbers(2), NEXT, 9)]
    WORLD.Mprobe(LAST, 6).Recv(into)
    message = WORLD.mprobe(tag=8)
    text = message.recv()
    found = MPI.Message.Probe(WORLD, LAST, 9)
    found.Irecv(into[:2]).Wait()
    MPI.Request.Waitall(sending)
    return [into, text]


@case
def nonblocking_collectives() -> Any:
    into, whole = np.zeros(5), np.zeros(5 * SIZE)
    requests = [
        WORLD.Iallreduce(numbers(5), into), WORLD.Iallgather(numbers(5), whole), WORLD.Ibarrier(),
        WORLD.Ibcast(numbers(2), 1),
    ]  # fmt: skip
    requests[0].Wait()
    MPI.Request.Waitall(requests[1:])
    return [into, whole]


# ---- objects ---------------------------------------------------------------------------------------------------------


@case
def objects() -> Any:
    thing = {"rank": RANK, "text": "x" * (10 * RANK)}
    if RANK == 0:
        WORLD.send(thing, 1, 3)
    elif RANK == 1:
        thing = WORLD.recv(source=0, tag=3)
    return thing


@case
def objects_exchanged() -> Any:
    return WORLD.sendrecv([RANK] * RANK, NEXT, 0, None, LAST, 0)


@case
def object_bcast() -> Any:
    return WORLD.bcast({"a": "y" * 100} if RANK == 1 else None, root=1)


@case
def object_gather() -> Any:
    return WORLD.gather("z" * (10 + RANK), root=2)


@case
def object_scatter() -> Any:
    return WORLD.scatter(["s" * (20 + r) for r in range(SIZE)] if RANK == 0 else None, root=0)


@case
def object_allgather() -> Any:
    return WORLD.allgather("a" * (5 + RANK))


@case
def object_alltoall() -> Any:
    return WORLD.alltoall(["b" * (r + 1) for r in range(SIZE)])


@case
def object_reductions() -> Any:
    return [WORLD.allreduce(RANK + 0.5), WORLD.reduce(RANK, MPI.MAX, 0), WORLD.scan(RANK), WORLD.exscan(RANK)]


@case
def object_barrier() -> Any:
    return WORLD.barrier()


@case
def own_pickler() -> Any:
    """A program's own pickler is used, and then the default one again."""
    pickler: Any = MPI.pickle
    pickler.__init__(lambda thing: b"<" + pickle.dumps(thing), lambda data: pickle.loads(bytes(data)[1:]))
    got = WORLD.bcast([1, 2], 0)
    protocols = [MPI.pickle.PROTOCOL]
    pickler.__init__()
    protocols.append(MPI.pickle.PROTOCOL)
    MPI.pickle.PROTOCOL = 2
    protocols.append(MPI.pickle.PROTOCOL)
    MPI.pickle.PROTOCOL = None
    protocols.append(MPI.pickle.PROTOCOL)
    return [got, protocols, WORLD.bcast([3], 0), MPI.pickle.loads(MPI.pickle.dumps({1}))]


# ---- other communicators ---------------------------------------------------------------------------------------------


@case
def split() -> Any:
    half = WORLD.Split(RANK % 2, key=-RANK)
    into = np.zeros(2)
    half.Allreduce(numbers(2), into)
    if half.Get_size() == 2:
        half.Bcast(into, 0)
    half.Free()
    return into


@case
def duplicate() -> Any:
    same = WORLD.Dup()
    same.Set_name("of mine")
    same.Barrier()
    found = [type(same).__name__, same == WORLD, isinstance(same, MPI.Intracomm), same.Get_name()]
    same.Free()
    again = WORLD.Dup()
    again.Barrier()
    again.Free()
    return found


@case
def alone() -> Any:
    into = np.zeros(2)
    MPI.COMM_SELF.Allreduce(numbers(2), into)
    return into


@case
def between_groups() -> Any:
    """An intercommunicator with one process on one side and two on the other."""
    side = 0 if RANK == 0 else 1
    local = WORLD.Split(side)
    inter = local.Create_intercomm(0, WORLD, 1 if side == 0 else 0, 12)
    into, whole = np.zeros(2), np.zeros(2 * inter.Get_remote_size())
    inter.Allreduce(numbers(2), into)
    inter.Allgather(numbers(2), whole)
    inter.Bcast(into, MPI.ROOT if RANK == 0 else 0)
    if RANK == 0:
        inter.Send(into, 1, 2)
    elif RANK == 2:
        inter.Recv(into, 0, 2)
    text = inter.bcast("inter", MPI.ROOT if RANK == 0 else 0)
    merged = inter.Merge()
    merged.Barrier()
    merged.Free()
    inter.Free()
    local.Free()
    return [into, whole, text]


@case
def cartesian() -> Any:
    ring = WORLD.Create_cart([SIZE], periods=[True])
    into, given = np.zeros(4), np.zeros(4)
    ring.Neighbor_allgather(numbers(2), into)
    ring.Neighbor_alltoall(numbers(4), given)
    source, destination = ring.Shift(0, 1)
    ring.Sendrecv_replace(into, destination, source=source)
    neighbors = ring.neighbor_allgather(RANK)
    request = ring.Ineighbor_allgather(numbers(2), into)
    request.Wait()
    ring.Free()
    return [into, given, neighbors]


@case
def distributed_graph() -> Any:
    graph = WORLD.Create_dist_graph_adjacent([LAST], [NEXT])
    into = np.zeros(3)
    graph.Neighbor_allgather(numbers(3), into)
    graph.Neighbor_alltoallv([numbers(3), [3]], [into, [3]])
    graph.Free()
    return into


class Traced(MPI.Intracomm):
    """A program's own communicator, which overrides a method."""

    def Barrier(self) -> None:  # noqa: N802
        super().Barrier()


@case
def subclass() -> Any:
    comm = Traced(WORLD)
    comm.Barrier()
    into = np.zeros(1)
    comm.Allreduce(numbers(1), into)
    return [type(comm).__name__, comm == WORLD, into]


# ---- one-sided -------------------------------------------------------------------------------------------------------


@case
def fenced() -> Any:
    memory = numbers(4)
    window = MPI.Win.Create(memory, 8, comm=WORLD)
    into = np.zeros(3)
    window.Fence()
    window.Put([numbers(2), MPI.DOUBLE], NEXT)
    window.Fence()
    window.Get(into, LAST)
    window.Accumulate([numbers(1), MPI.DOUBLE], NEXT, 3)
    window.Fence()
    window.Free()
    return [memory, into]


@case
def locked() -> Any:
    window: Any = MPI.Win.Allocate(32, 8, comm=WORLD)
    own = np.frombuffer(window, "f8")
    own[:] = 0
    WORLD.Barrier()
    into, one = np.zeros(1), np.ones(1)
    window.Lock(0)
    window.Fetch_and_op(one, into, 0)
    window.Flush(0)
    window.Unlock(0)
    WORLD.Barrier()
    window.Lock_all()
    window.Rget(into, 0).Wait()
    window.Unlock_all()
    WORLD.Barrier()
    window.Free()
    return into


# ---- errors ----------------------------------------------------------------------------------------------------------


@case
def no_such_rank() -> Any:
    WORLD.Send(numbers(1), SIZE + 3)


@case
def no_such_root() -> Any:
    WORLD.Bcast(numbers(1), 17)


@case
def mismatch() -> Any:
    WORLD.Allreduce(numbers(1), np.zeros(2))


@case
def not_a_buffer() -> Any:
    WORLD.Allreduce("text", 7)


@case
def too_few_arguments() -> Any:
    WORLD.Allreduce()


@case
def unknown_argument() -> Any:
    WORLD.Bcast(numbers(1), nothing=0)


@case
def truncated() -> Any:
    into = np.zeros(1)
    WORLD.Isend(numbers(4), RANK, 21)
    WORLD.Recv(into, RANK, 21)


@case
def cannot_be_pickled() -> Any:
    WORLD.send(threading.Lock(), NEXT)


@case
def freed() -> Any:
    gone = WORLD.Dup()
    gone.Free()
    gone.Barrier()


@case
def null() -> Any:
    MPI.COMM_NULL.Barrier()


# ---- what a program may inspect --------------------------------------------------------------------------------------


@case
def appearance() -> Any:
    def signature(method: Any) -> str:
        return re.sub("0x[0-9a-f]+", "", str(inspect.signature(method)))

    methods = [MPI.Comm.Allreduce, MPI.Intracomm.Scan, MPI.Request.Waitall, MPI.Win.Put, MPI.Comm.bcast]
    return [
        [method.__name__ for method in methods], [method.__qualname__ for method in methods],
        [method.__doc__ for method in methods], [signature(method) for method in methods],
        MPI.Intracomm.Allreduce is MPI.Comm.Allreduce, MPI.Comm.Allreduce is MPI.Comm.Allreduce,
        pickle.loads(pickle.dumps(WORLD)) is WORLD, type(WORLD) is MPI.Intracomm, MPI.COMM_WORLD is WORLD,
        [sorted(dir(cls)) for cls in (MPI.Comm, MPI.Request, MPI.Win)], callable(WORLD.Allreduce),
        signature(WORLD.Allreduce), MPI.Comm.__name__, pickle.loads(pickle.dumps(WORLD.Barrier))(),
    ]  # fmt: skip


@case
def cached_method() -> Any:
    allreduce, into = WORLD.Allreduce, np.zeros(1)
    for _ in range(3):
        allreduce(numbers(1), into)
    return into


@case
def threads() -> Any:
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return None
    comms = [WORLD.Dup() for _ in range(2)]
    totals = [np.zeros(1) for _ in comms]

    def work(number: int) -> None:
        for _ in range(50):
            comms[number].Allreduce(numbers(1), totals[number])

    workers = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for comm in comms:
        comm.Free()
    return totals


def shown(value: Any) -> Any:
    """Return a value as JSON can represent it."""
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    if isinstance(value, (list, tuple)):
        return [shown(each) for each in value]
    if isinstance(value, np.generic):
        return value.item()
    return value


def result(function: Case) -> Any:
    try:
        return shown(function())
    except Exception as error:
        code = [error.Get_error_class()] if isinstance(error, MPI.Exception) else []
        return [type(error).__name__, *code, "" if code else str(error)]


def main() -> None:
    """Run the cases, one after another."""
    results = {name: result(CASES[name]) for name in sys.argv[2:] or CASES}
    Path(f"{sys.argv[1]}.{RANK}").write_text(json.dumps(results, default=repr))


main()
