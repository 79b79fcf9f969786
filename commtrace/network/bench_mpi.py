"""MPI as a library to measure, through mpi4py's buffer methods (upper-case names), which do not copy or pickle."""

# ruff: noqa: D102 (the methods are documented in BenchLibrary and BenchGroup)
from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from . import NetworkError
from .bench_operations import POINT_TO_POINT, Values
from .measuring import BenchGroup, BenchLibrary, Call, message_call

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError if it finds no MPI
    raise NetworkError(f"--through mpi4py: mpi4py or its MPI library cannot be loaded ({error})") from error

_POLL_SECONDS: Final = 0.001


class MpiBenchLibrary(BenchLibrary):
    """All ranks of MPI.COMM_WORLD."""

    def __init__(self) -> None:
        self._world: Any = MPI.COMM_WORLD
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()
        self.local_rank = self._world.Split_type(MPI.COMM_TYPE_SHARED).Get_rank()

    def group(self, ranks: Sequence[int]) -> BenchGroup | None:
        comm = self._world.Create(self._world.Get_group().Incl([*ranks]))
        return MpiBenchGroup(comm) if comm != MPI.COMM_NULL else None

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
    """An MPI communicator."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()

    def buffer(self, count: int) -> Values:
        return np.zeros(count, np.float32)

    def fill(self, buffer: Values, values: Values) -> None:
        buffer[:] = values

    def values(self, buffer: Values) -> Values:
        return buffer

    def barrier(self) -> None:
        self._comm.Barrier()

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = self._comm.allgather(value)
        return values

    def call(self, op: str, source: Values, result: Values, messages: int) -> Call:
        comm, is_root, peer = self._comm, self.rank == 0, 1 - self.rank
        if op in POINT_TO_POINT:
            return message_call(
                op, self.rank, source, result, self.buffer(1), messages,
                send=partial(comm.Send, dest=peer), recv=partial(comm.Recv, source=peer),
                isend=partial(comm.Isend, dest=peer), irecv=partial(comm.Irecv, source=peer),
                wait_all=MPI.Request.Waitall,
            )  # fmt: skip
        calls: dict[str, Call] = {
            "all_reduce": lambda: comm.Allreduce(source, result),
            "all_gather": lambda: comm.Allgather(source, result),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(source, result),
            "broadcast": lambda: comm.Bcast(result, 0),
            "reduce": lambda: comm.Reduce(source, result if is_root else None, root=0),
            "all_to_all": lambda: comm.Alltoall(source, result),
            "gather": lambda: comm.Gather(source, result if is_root else None, 0),
            "scatter": lambda: comm.Scatter(source if is_root else None, result, 0),
            "barrier": comm.Barrier,
        }
        return calls[op]
