"""Every recorded method, on every kind of communicator that has it, called by three ranks: methods.py FILE.

The result of each call goes into FILE.RANK, and its times into FILE.times.RANK, by kind and method, for example
"cartesian.Ineighbor_alltoallv". Methods that this MPI does not have raise, traced or not.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

WORLD: Any = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()
NEXT, LAST = (RANK + 1) % SIZE, (RANK - 1) % SIZE
DOUBLE = MPI.DOUBLE

results: dict[str, Any] = {}
times: dict[str, tuple[int, int]] = {}


def called(name: str, call: Callable[[], Any], *outputs: Any) -> None:
    """Make a call, and keep its result or exception and the contents of these buffers afterwards."""
    begin = time.monotonic_ns()
    try:
        result = shown(call())
    except Exception as error:
        result = [type(error).__name__, error.Get_error_class() if isinstance(error, MPI.Exception) else str(error)]
    assert name not in times, name
    times[name] = begin, time.monotonic_ns()
    results[name] = [result, *map(shown, outputs)]


def shown(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [shown(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def numbers(count: int) -> Any:
    return np.arange(count) + 10.0 * RANK


# ---- collectives -----------------------------------------------------------------------------------------------------


def kinds() -> dict[str, Any]:
    """Return a communicator of each kind, by name."""
    square = WORLD.Create_cart([SIZE, 1], periods=[True, False])
    side = WORLD.Split(RANK == 2)  # two processes and one
    members = WORLD.Get_group()
    first = WORLD.Create_group(members.Incl([0, 1])) if RANK < 2 else MPI.COMM_NULL
    made = {
        "duplicate": WORLD.Dup(),
        "split": WORLD.Split(0, key=-RANK),
        "by_type": WORLD.Split_type(MPI.COMM_TYPE_SHARED),
        "created": WORLD.Create(members),
        "two": first,
        "cartesian": WORLD.Create_cart([SIZE], periods=[True]),
        "part": square.Sub([True, False]),
        "graph": WORLD.Create_graph([1, 3, 4], [1, 0, 2, 1]),  # a line
        "distributed": WORLD.Create_dist_graph_adjacent([LAST], [NEXT]),
        "by_edges": WORLD.Create_dist_graph([RANK], [1], [NEXT]),
        "between": side.Create_intercomm(0, WORLD, 2 if RANK < 2 else 0, 3),
    }
    return {name: comm for name, comm in made.items() if comm != MPI.COMM_NULL}


class Shape:
    """Sizes that determine the arguments. The root is rank 1, or the process that is alone on its side.

    So no process passes MPI.PROC_NULL, with which both tested MPIs fail in nonblocking collectives.
    """

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.inter = comm.Is_inter()
        self.size, self.rank = comm.Get_size(), comm.Get_rank()
        self.blocks = comm.Get_remote_size() if self.inter else self.size
        self.root = (MPI.ROOT if RANK == 2 else 0) if self.inter else 1
        self.is_root = self.root == (MPI.ROOT if self.inter else self.rank)
        self.contributes = self.root != MPI.ROOT
        """Whether the process has its own share in a collective with a root."""
        topology = isinstance(comm, MPI.Topocomm)
        self.sources: int = comm.indegree if topology else 0
        self.destinations: int = comm.outdegree if topology else 0


def ones(count: int) -> list[int]:
    return [each + 1 for each in range(count)]


def typed(buffer: Any, counts: list[int]) -> list[Any]:
    places = [8 * place for place in np.cumsum([0, *counts])[:-1].tolist()]
    return [buffer, counts, places, [DOUBLE] * len(counts)]


def arguments(base: str, shape: Shape) -> tuple[list[Any], Any]:
    """Return the arguments of a collective by the name of its blocking form, and its output buffer."""
    size, blocks, rank = shape.size, shape.blocks, shape.rank
    whole = sum(ones(blocks))
    if base == "Barrier":
        return [], None
    if base == "Bcast":
        buffer = numbers(2)
        return [buffer, shape.root], buffer
    if base in ("Gather", "Gatherv"):
        varied = base.endswith("v")
        into = np.zeros(whole if varied else 2 * blocks) if shape.is_root else None
        given = numbers(rank + 1 if varied else 2) if shape.contributes else None
        return [given, [into, ones(blocks)] if varied and shape.is_root else into, shape.root], into
    if base in ("Scatter", "Scatterv"):
        varied = base.endswith("v")
        into = np.zeros(rank + 1 if varied else 2) if shape.contributes else None
        given = numbers(whole if varied else 2 * blocks) if shape.is_root else None
        return [[given, ones(blocks)] if varied and shape.is_root else given, into, shape.root], into
    if base == "Reduce":
        into = np.zeros(2) if shape.is_root else None
        return [numbers(2) if shape.contributes else None, into, MPI.MAX, shape.root], into
    into, given = _rootless_buffers(base, shape, size, blocks, rank, whole)
    counts = [[[1, 3][:size] if size == 2 else [4] if shape.inter else ones(size)]] if base == "Reduce_scatter" else []
    operator = [MPI.SUM] if base in _REDUCING else []
    return [given, into, *(counts[0] if counts else []), *operator], into[0] if isinstance(into, list) else into


_REDUCING = ("Allreduce", "Reduce_scatter_block", "Reduce_scatter", "Scan", "Exscan")


def _rootless_buffers(base: str, shape: Shape, size: int, blocks: int, rank: int, whole: int) -> tuple[Any, Any]:
    """Return the receive and send buffers of a collective without a root."""
    degree_in, degree_out = shape.sources, shape.destinations
    forms: dict[str, Callable[[], tuple[Any, Any]]] = {
        "Allgather": lambda: (np.zeros(2 * blocks), numbers(2)),
        "Allgatherv": lambda: ([np.zeros(whole), ones(blocks)], numbers(rank + 1)),
        "Alltoall": lambda: (np.zeros(2 * blocks), numbers(2 * blocks)),
        "Alltoallv": lambda: ([np.zeros(blocks * (rank + 1)), [rank + 1] * blocks], [numbers(whole), ones(blocks)]),
        "Alltoallw": lambda: (
            typed(np.zeros(blocks * (rank + 1)), [rank + 1] * blocks), typed(numbers(whole), ones(blocks)),
        ),
        "Allreduce": lambda: (np.zeros(2), numbers(2)),
        "Scan": lambda: (np.zeros(2), numbers(2)),
        "Exscan": lambda: (np.zeros(2), numbers(2)),
        "Reduce_scatter_block": lambda: (
            np.zeros(4 // size if shape.inter else 2), numbers(4 if shape.inter else 2 * size),
        ),
        "Reduce_scatter": lambda: (
            np.zeros(([1, 3] if size == 2 else [4] if shape.inter else ones(size))[rank]),
            numbers(4 if shape.inter or size == 2 else sum(ones(size))),
        ),
        "Neighbor_allgather": lambda: (np.zeros(2 * degree_in), numbers(2)),
        "Neighbor_allgatherv": lambda: ([np.zeros(2 * degree_in), [2] * degree_in], numbers(2)),
        "Neighbor_alltoall": lambda: (np.zeros(2 * degree_in), numbers(2 * degree_out)),
        "Neighbor_alltoallv": lambda: (
            [np.zeros(2 * degree_in), [2] * degree_in], [numbers(2 * degree_out), [2] * degree_out],
        ),
        "Neighbor_alltoallw": lambda: (
            typed(np.zeros(2 * degree_in), [2] * degree_in), typed(numbers(2 * degree_out), [2] * degree_out),
        ),
    }  # fmt: skip
    return forms[base]()


def bases(comm: Any) -> Iterator[str]:
    """Yield the blocking forms that this communicator has."""
    yield from (
        "Barrier", "Bcast", "Gather", "Gatherv", "Scatter", "Scatterv", "Allgather", "Allgatherv", "Alltoall",
        "Alltoallv", "Alltoallw", "Reduce", "Allreduce", "Reduce_scatter_block", "Reduce_scatter",
    )  # fmt: skip
    if isinstance(comm, MPI.Intracomm):
        yield from ("Scan", "Exscan")
    if isinstance(comm, MPI.Topocomm):
        yield from (f"Neighbor_all{rest}" for rest in ("gather", "gatherv", "toall", "toallv", "toallw"))


def collectives() -> None:
    """Call each collective in its three forms, and those that pickle."""
    for kind, comm in kinds().items():
        shape = Shape(comm)
        for base in bases(comm):
            given, into = arguments(base, shape)
            called(f"{kind}.{base}", lambda: getattr(comm, base)(*given), into)  # noqa: B023
            given, into = arguments(base, shape)
            called(f"{kind}.I{base.lower()}", lambda: getattr(comm, f"I{base.lower()}")(*given).Wait(), into)  # noqa: B023
            if shape.inter:
                continue  # persistent collectives on intercommunicators are unreliable in all tested MPIs
            given, into = arguments(base, shape)
            called(f"{kind}.{base}_init", lambda: twice(getattr(comm, f"{base}_init")(*given)), into)  # noqa: B023
        objects(kind, comm, shape)
        comm.Free()


def twice(request: Any) -> None:
    """Use a persistent request twice."""
    for _ in range(2):
        request.Start()
        request.Wait()
    request.Free()


def objects(kind: str, comm: Any, shape: Shape) -> None:
    thing, things = f"{RANK}", [f"{RANK}"] * shape.blocks
    called(f"{kind}.barrier", lambda: comm.barrier())
    called(f"{kind}.bcast", lambda: comm.bcast(thing, shape.root))
    called(f"{kind}.gather", lambda: comm.gather(thing, shape.root))
    called(f"{kind}.scatter", lambda: comm.scatter(things if shape.is_root else None, shape.root))
    called(f"{kind}.allgather", lambda: comm.allgather(thing))
    called(f"{kind}.alltoall", lambda: comm.alltoall(things))
    called(f"{kind}.reduce", lambda: comm.reduce(RANK, MPI.SUM, shape.root))
    called(f"{kind}.allreduce", lambda: comm.allreduce(RANK, MPI.MAX))
    if isinstance(comm, MPI.Intracomm):
        called(f"{kind}.scan", lambda: comm.scan(RANK))
        called(f"{kind}.exscan", lambda: comm.exscan(RANK))
    if isinstance(comm, MPI.Topocomm):
        called(f"{kind}.neighbor_allgather", lambda: comm.neighbor_allgather(thing))
        called(f"{kind}.neighbor_alltoall", lambda: comm.neighbor_alltoall([thing] * shape.destinations))


# ---- messages --------------------------------------------------------------------------------------------------------


def messages() -> None:
    """Send messages of four numbers to the next rank, each with its own tag, and receive from the last one."""
    comm = WORLD.Split(0, key=-RANK)  # ranks in it are not those of the world
    after, before = (comm.Get_rank() + 1) % SIZE, (comm.Get_rank() - 1) % SIZE
    MPI.Attach_buffer(bytearray(1 << 16))
    tag = 100

    def sends(name: str, send: Callable[[], Any]) -> None:
        into = np.zeros(4)
        receiving = comm.Irecv(into, before, tag)
        comm.Barrier()  # all are ready, as Rsend requires
        called(f"message.{name}", send)
        if results[f"message.{name}"][0] is None:
            receiving.Wait()
        else:
            receiving.Cancel()
            receiving.Wait()
        results[f"message.{name}"].append(shown(into))

    def receives(name: str, receive: Callable[[Any], Any]) -> None:
        into, given = np.zeros(9), numbers(4)
        sending = comm.Isend(given, after, tag)
        called(f"message.{name}", lambda: receive(into), into)
        sending.Wait()

    for mode in ("", "b", "s", "r"):
        for name in (f"{mode}send".capitalize(), f"I{mode}send", f"{mode}send".capitalize() + "_init"):
            tag += 1

            def send(name: str = name, tag: int = tag) -> None:
                result = getattr(comm, name)(numbers(4), after, tag)
                if name.endswith("_init"):
                    result.Start()
                if result is not None:
                    result.Wait()

            sends(name, send)
    tag += 1
    receives("Recv", lambda into: comm.Recv(into, before, tag))
    receives("Irecv", lambda into: comm.Irecv(into, before, tag).Wait())

    def prepared(into: Any) -> None:
        request = comm.Recv_init(into, before, tag)
        request.Start()
        request.Wait()

    receives("Recv_init", prepared)
    receives("Message.Recv", lambda into: comm.Mprobe(before, tag).Recv(into))
    receives("Message.Irecv", lambda into: comm.Mprobe(before, tag).Irecv(into).Wait())
    exchanges(comm, after, before)
    pickled_messages(comm, after, before)
    partitioned(comm, after, before)
    MPI.Detach_buffer()
    comm.Free()


def exchanges(comm: Any, after: int, before: int) -> None:
    into, both = np.zeros(4), numbers(4)
    called("message.Sendrecv", lambda: comm.Sendrecv(numbers(4), after, 7, into, before, 7), into)
    called("message.Sendrecv_replace", lambda: comm.Sendrecv_replace(both, after, 7, before, 7), both)
    into, both = np.zeros(4), numbers(4)
    called("message.Isendrecv", lambda: comm.Isendrecv(numbers(4), after, 7, into, before, 7).Wait(), into)
    called("message.Isendrecv_replace", lambda: comm.Isendrecv_replace(both, after, 7, before, 7).Wait(), both)


def pickled_messages(comm: Any, after: int, before: int) -> None:
    thing = [RANK] * 5
    for mode in ("", "b", "s"):
        receiving = comm.irecv(source=before, tag=8)
        called(f"message.{mode}send", lambda: getattr(comm, f"{mode}send")(thing, after, 8))  # noqa: B023
        results[f"message.{mode}send"].append(receiving.wait())
        receiving = comm.irecv(source=before, tag=8)
        called(f"message.i{mode}send", lambda: getattr(comm, f"i{mode}send")(thing, after, 8).wait())  # noqa: B023
        results[f"message.i{mode}send"].append(receiving.wait())

    def receives(name: str, receive: Callable[[], Any]) -> None:
        sending = comm.isend(thing, after, 9)
        called(f"message.{name}", receive)
        sending.wait()

    receives("recv", lambda: comm.recv(source=before, tag=9))
    receives("irecv", lambda: comm.irecv(source=before, tag=9).wait())
    receives("Message.recv", lambda: comm.mprobe(before, 9).recv())
    receives("Message.irecv", lambda: comm.mprobe(before, 9).irecv().wait())
    called("message.sendrecv", lambda: comm.sendrecv(thing, after, 10, None, before, 10))


def partitioned(comm: Any, after: int, before: int) -> None:
    """Send three parts of two numbers, which become ready in another order; twice."""
    into, given = np.zeros((3, 2)), numbers(6).reshape(3, 2)
    kept: dict[str, Any] = {}

    def both() -> None:
        kept["receiving"] = comm.Precv_init(into, 3, before, 11)
        kept["sending"] = comm.Psend_init(given, 3, after, 11)
        for _ in range(2):
            MPI.Prequest.Startall([kept["receiving"], kept["sending"]])
            for part in (2, 0, 1):
                kept["sending"].Pready(part)
            while not kept["receiving"].Parrived(1):
                pass
            MPI.Request.Waitall([kept["sending"], kept["receiving"]])
        kept["sending"].Free()
        kept["receiving"].Free()

    called("message.Psend_init", both, into)


# ---- requests --------------------------------------------------------------------------------------------------------


Completion = Callable[[list[Any]], object]


def completions() -> dict[str, Completion]:
    """Return functions that complete all of some requests, by the name of the method that they use."""
    request: Any = MPI.Request

    def wait_each(name: str) -> Completion:
        return lambda requests: [getattr(each, name)() for each in requests]

    def poll_each(name: str) -> Completion:
        return lambda requests: [until(getattr(each, name)) for each in requests]

    def wait_all(name: str) -> Completion:
        return lambda requests: getattr(request, name)(requests)

    def wait_any(name: str) -> Completion:
        return lambda requests: [getattr(request, name)(requests) for _ in requests]

    def poll_any_once(name: str) -> Completion:
        return lambda requests: until(getattr(request, name), requests, at=1)

    def poll_any(name: str) -> Completion:
        return lambda requests: [poll_any_once(name)(requests) for _ in requests]

    def poll_all(name: str) -> Completion:
        return lambda requests: until(getattr(request, name), requests)

    def repeat_some(name: str) -> Completion:
        return lambda requests: until_each_is_reported(getattr(request, name), requests)

    kinds = {
        wait_each: ("Wait", "wait"),
        poll_each: ("Test", "test", "Get_status", "get_status"),
        wait_all: ("Waitall", "waitall"),
        wait_any: ("Waitany", "waitany"),
        poll_any_once: ("Get_status_any", "get_status_any"),
        poll_any: ("Testany", "testany"),
        poll_all: ("Testall", "testall", "Get_status_all", "get_status_all"),
        repeat_some: ("Waitsome", "waitsome", "Testsome", "testsome", "Get_status_some", "get_status_some"),
    }
    return {name: make(name) for make, names in kinds.items() for name in names}


def requests() -> None:
    """Complete two receives with each of the methods."""
    for name, complete in completions().items():
        into = np.zeros((2, 3))
        receiving = [WORLD.Irecv(into[number], LAST, 50 + number) for number in range(2)]
        sending = [WORLD.Isend(numbers(3), NEXT, 50 + number) for number in range(2)]
        MPI.Request.Waitall(sending)
        called(f"request.{name}", lambda: complete(receiving) and None)  # noqa: B023
        MPI.Request.Waitall(receiving)
        results[f"request.{name}"].append(shown(into))


def until(done: Callable[..., Any], *given: Any, at: int = 0) -> bool:
    """Call `done` until its result is true, or element `at` if the result is a tuple."""
    while True:
        answer = done(*given)
        if answer[at] if isinstance(answer, tuple) else answer:
            return True


def until_each_is_reported(method: Callable[..., Any], requests: list[Any]) -> None:
    """Call `method` until it has reported each request as complete."""
    reported: set[int] = set()
    while len(reported) < len(requests):
        WORLD.Iprobe()  # MPICH's Get_status_some makes no progress itself
        answer = method(requests)
        indices, *_ = answer if isinstance(answer, tuple) else (answer,)
        reported.update(indices or [])


# ---- windows ---------------------------------------------------------------------------------------------------------


def windows() -> None:
    memory = np.zeros(8)
    window: Any = MPI.Win.Create(memory, 8, comm=WORLD)

    def under_lock(operation: Callable[[], Any]) -> Any:
        window.Lock(NEXT)
        try:
            request = operation()
            if request is not None:
                request.Wait()
        finally:
            window.Unlock(NEXT)

    def operations(capital: Callable[[str], str]) -> dict[str, Callable[[], Any]]:
        def method(name: str) -> Any:
            return getattr(window, capital(name))

        return {
            capital("Put"): lambda: method("Put")(numbers(2), NEXT),
            capital("Get"): lambda: method("Get")(into[:3], NEXT),
            capital("Accumulate"): lambda: method("Accumulate")(numbers(2), NEXT, 2, MPI.SUM),
            capital("Get_accumulate"): lambda: method("Get_accumulate")(numbers(2), into[:2], NEXT, 4, MPI.SUM),
        }

    into = np.zeros(4)
    for capital in (lambda name: name, lambda name: f"R{name.lower()}"):
        for name, operation in operations(capital).items():
            WORLD.Barrier()
            called(f"window.{name}", lambda: under_lock(operation), into)  # noqa: B023
            WORLD.Barrier()
            results[f"window.{name}"].append(shown(memory))
    one, back = np.ones(1), np.zeros(1)
    new, old, found = (np.full(1, value, "i8") for value in (5, 0, 9))  # no MPI compares floating-point numbers
    WORLD.Barrier()
    called("window.Fetch_and_op", lambda: under_lock(lambda: window.Fetch_and_op(one, back, NEXT, 6, MPI.SUM)), back)
    called(
        "window.Compare_and_swap",
        lambda: under_lock(lambda: window.Compare_and_swap(new, old, found, NEXT, 7)),
        found,
    )
    WORLD.Barrier()
    called("window.Fence", window.Fence)
    fetched = np.zeros(2)
    called("window.fetches", lambda: window.Get_accumulate(numbers(2), fetched, NEXT, 0, MPI.NO_OP))
    window.Fence()
    results["window.fetches"].append(shown(fetched))
    started(window, memory)
    window.Free()


def started(window: Any, memory: Any) -> None:
    """Synchronize with Post, Start, Complete and Wait."""
    world = WORLD.Get_group()
    window.Post(world.Incl([LAST]))

    def put() -> None:
        window.Start(world.Incl([NEXT]))
        window.Put(numbers(3), NEXT, 5)
        window.Complete()

    called("window.started", put)
    window.Wait()
    results["window.started"].append(shown(memory))


# ---- forms of buffers, and mistakes ----------------------------------------------------------------------------------


class WithDLPack:
    """Memory that only DLPack describes."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**{key: value for key, value in options.items() if value is not None})

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


class WithVersionedDLPack(WithDLPack):
    """Memory in the versioned capsule of DLPack 1.0."""

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(max_version=(1, 0))


class WithDLPackAndSizes(WithDLPack):
    """Memory that also has these attributes of arrays and tensors."""

    @property
    def dtype(self) -> Any:
        return self._array.dtype

    @property
    def nbytes(self) -> int:
        return int(self._array.nbytes)


class WithInterface:
    """Host memory that only CUDA's array interface describes."""

    def __init__(self, array: Any) -> None:
        self._array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface = self._array.__array_interface__
        return {**interface, "version": 3, "stream": None}


def buffers() -> None:
    forms: dict[str, Callable[[Any], Any]] = {
        "dlpack": WithDLPack,
        "dlpack_versioned": WithVersionedDLPack,
        "dlpack_and_sizes": WithDLPackAndSizes,
        "interface": WithInterface,
        "interface_and_type": lambda array: [WithInterface(array), DOUBLE],
        "dlpack_count_and_type": lambda array: [WithDLPack(array), 3, DOUBLE],
        "matrix": lambda array: array.reshape(2, 3),
        "scalar": lambda array: array[:1].reshape(()),
        "memory": memoryview,
        "mpi_buffer": lambda array: MPI.buffer.frombuffer(array),
        "empty": lambda array: array[:0],
    }
    for name, form in forms.items():
        array = numbers(6)
        called(f"buffer.{name}", lambda: WORLD.Bcast(form(array), 1), array)  # noqa: B023


@contextlib.contextmanager
def nothing_cached() -> Iterator[None]:
    """Clear the type cache again and again, so that each attribute is looked up anew."""

    def clear(*_: object) -> None:
        sys._clear_type_cache()

    thresholds = gc.get_threshold()
    gc.callbacks.append(clear)
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(clear)


def mistakes() -> None:
    """Make calls that mpi4py refuses: exceptions and their texts must be the same with tracing."""
    gone = WORLD.Dup()
    gone.Free()
    shape = Shape(WORLD)
    for base in ("Barrier", "Bcast", "Gather", "Allgatherv", "Alltoallw", "Reduce", "Allreduce", "Scan"):
        for name in (base, f"I{base.lower()}", f"{base}_init"):
            given, _ = arguments(base, shape)
            called(f"mistake.{name} of nothing", lambda: getattr(MPI.COMM_NULL, name)(*given))  # noqa: B023
            called(f"mistake.{name} of a freed one", lambda: getattr(gone, name)(*given))  # noqa: B023
            called(f"mistake.{name} with a name that is not one", lambda: getattr(WORLD, name)(nothing=1))  # noqa: B023
    for name in ("Send", "Recv", "Isend", "Irecv", "send", "recv", "Send_init", "Sendrecv"):
        called(f"mistake.{name} with one too many", lambda: getattr(WORLD, name)(*range(12)))  # noqa: B023
        called(f"mistake.{name} with no argument but one unknown", lambda: getattr(WORLD, name)(far=1))  # noqa: B023
    called("mistake.read-only", lambda: WORLD.Recv(b"1234", LAST, 1))
    for number in range(20):
        with nothing_cached():
            called(f"mistake.read-only, nothing cached, {number}", lambda: WORLD.Recv(b"1234", LAST, 1))
    called("mistake.not contiguous", lambda: WORLD.Bcast(numbers(8)[::2], 0))
    called("mistake.negative tag", lambda: WORLD.Send(numbers(1), NEXT, -7))
    called("mistake.unequal", lambda: WORLD.Allgather(numbers(3), np.zeros(4)))
    called("mistake.Free of nothing", lambda: MPI.REQUEST_NULL.Free())
    called("mistake.Wait of nothing", lambda: MPI.Request(MPI.REQUEST_NULL).Wait())


def main() -> None:
    """Make all calls, and write their results and times."""
    for part in (collectives, messages, requests, windows, buffers, mistakes):
        part()
    Path(f"{sys.argv[1]}.{RANK}").write_text(json.dumps(results))
    Path(f"{sys.argv[1]}.times.{RANK}").write_text(json.dumps(times))


main()
