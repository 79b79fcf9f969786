"""The interface of a communication library that is measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .bench_plan import BenchPlan
from .measuring import BenchGroup, Call
from .operations import PING_PONG, WINDOW


class BenchLibrary(ABC):
    """torch.distributed or mpi4py in this process, with all ranks connected."""

    rank: int
    size: int
    local_rank: int

    @abstractmethod
    def group(self, ranks: Sequence[int]) -> BenchGroup | None:
        """Make a group of ranks; return None if this rank is not in it. All ranks call this, in the same order."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for all ranks without keeping a core busy: other ranks of this host may be measuring."""

    @abstractmethod
    def versions(self) -> Mapping[str, str]:
        """Return the versions of what is measured."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect. All ranks call this."""

    def abort(self) -> None:  # noqa: B027
        """End the other ranks, because this one has failed, if they do not see their connections break."""


class Transfers(NamedTuple):
    """Functions of a library that send a buffer to the other rank of a pair, or receive one."""

    send: Callable[[Any], object]
    recv: Callable[[Any], object]
    isend: Callable[[Any], object]
    irecv: Callable[[Any], object]
    wait_all: Callable[[list[Any]], object]


def message_call(
    op: str, rank: int, transfers: Transfers, source: Any, result: Any, answer: Any, messages: int
) -> Call:
    """Return what a rank of a pair calls to exchange messages; `answer` is a buffer of one element."""
    send, recv, isend, irecv, wait_all = transfers
    calls: dict[tuple[str, int], Call] = {
        (PING_PONG, 0): lambda: (send(source), recv(result)),
        (PING_PONG, 1): lambda: (recv(result), send(source)),
        (WINDOW, 0): lambda: (wait_all([isend(source) for _ in range(messages)]), recv(answer)),
        (WINDOW, 1): lambda: (wait_all([irecv(result) for _ in range(messages)]), send(answer)),
    }
    return calls[op, rank]


def connect(plan: BenchPlan) -> BenchLibrary:
    """Connect this process, as a rank, through the plan's library.

    Raises:
        NetworkError: The library is not installed, or the ranks did not find each other.
    """
    if plan.through == "mpi4py":
        from .bench_mpi import MpiBenchLibrary

        return MpiBenchLibrary()
    from .bench_torch import TorchBenchLibrary

    return TorchBenchLibrary(plan)
