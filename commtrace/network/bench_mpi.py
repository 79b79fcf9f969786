"""MPI as a library to measure, by mpi4py's buffer methods (upper-case names), which copy and pickle nothing."""

# ruff: noqa: D102 (the methods are documented in BenchLibrary and BenchGroup)
from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from . import NetworkError
from .bench_library import BenchLibrary
from .bench_plan import BenchPlan
from .measuring import BenchGroup, Call
from .operations import PING_PONG, Values

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError if it finds no MPI
    raise NetworkError(f"--through mpi4py: mpi4py or its MPI cannot be loaded ({error})") from error


_POLL_SECONDS: Final = 0.001


def connect(plan: BenchPlan) -> MpiBenchLibrary:
    """Connect the ranks of MPI.COMM_WORLD."""
    return MpiBenchLibrary(MPI.COMM_WORLD)


class MpiBenchLibrary(BenchLibrary):
    """All ranks of MPI.COMM_WORLD."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.rank, self.size = world.Get_rank(), world.Get_size()
        self.local_rank = world.Split_type(MPI.COMM_TYPE_SHARED).Get_rank()

    def group(self, ranks: Sequence[int]) -> BenchGroup | None:
        comm = self._world.Create(self._world.Get_group().Incl([*ranks]))
        return MpiBenchGroup(comm) if comm != MPI.COMM_NULL else None

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = self._world.allgather(value)
        return values

    def wait(self) -> None:
        request = self._world.Ibarrier()
        while not request.Test():
            time.sleep(_POLL_SECONDS)

    def versions(self) -> Mapping[str, str]:
        import mpi4py

        name, numbers = MPI.get_vendor()
        return {"mpi4py": mpi4py.__version__, "mpi": f"{name} {'.'.join(map(str, numbers))}"}

    def close(self) -> None:
        self._world.Barrier()  # MPI ends with the process

    def abort(self) -> None:
        self._world.Abort(1)


class MpiBenchGroup(BenchGroup):
    """A communicator of MPI."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()

    def buffer(self, count: int) -> Values:
        return np.zeros(count, np.float32)

    def fill(self, buffer: Values, values: Values) -> None:
        buffer[:] = values

    def values(self, buffer: Values) -> Values:
        return buffer

    def settle(self) -> None:
        pass  # blocking calls are complete when they return

    def barrier(self) -> None:
        self._comm.Barrier()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        rows: list[list[float]] = self._comm.allgather([*values])
        return rows

    def call(self, op: str, source: Values, result: Values, messages: int) -> Call:
        if op.startswith("send_recv"):
            return self._ping_pong(source, result) if op == PING_PONG else self._window(source, result, messages)
        comm, at_root = self._comm, self.rank == 0
        calls: dict[str, Call] = {
            "all_reduce": lambda: comm.Allreduce(source, result),
            "all_gather": lambda: comm.Allgather(source, result),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(source, result),
            "broadcast": lambda: comm.Bcast(result, 0),
            "reduce": lambda: comm.Reduce(source, result if at_root else None, root=0),
            "all_to_all": lambda: comm.Alltoall(source, result),
            "gather": lambda: comm.Gather(source, result if at_root else None, 0),
            "scatter": lambda: comm.Scatter(source if at_root else None, result, 0),
            "barrier": comm.Barrier,
        }
        return calls[op]

    def _ping_pong(self, source: Values, result: Values) -> Call:
        comm, other = self._comm, 1 - self.rank

        def first() -> None:
            comm.Send(source, other)
            comm.Recv(result, other)

        def second() -> None:
            comm.Recv(result, other)
            comm.Send(source, other)

        return second if self.rank else first

    def _window(self, source: Values, result: Values, messages: int) -> Call:
        comm, answer = self._comm, np.zeros(1, np.float32)

        def sender() -> None:
            MPI.Request.Waitall([comm.Isend(source, 1) for _ in range(messages)])
            comm.Recv(answer, 1)

        def receiver() -> None:
            MPI.Request.Waitall([comm.Irecv(result, 0) for _ in range(messages)])
            comm.Send(answer, 0)

        return receiver if self.rank else sender
