"""The interface of a communication library that is measured."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from .bench_plan import BenchPlan
from .measuring import BenchGroup


class BenchLibrary(ABC):
    """torch.distributed or mpi4py in this process, with all ranks connected."""

    rank: int
    size: int
    local_rank: int

    @abstractmethod
    def group(self, ranks: Sequence[int]) -> BenchGroup | None:
        """Make a group of ranks; return None if this rank is not in it. All ranks call this, in the same order."""

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Return the small objects of all ranks, on every rank."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for all ranks without keeping a core busy: other ranks of this host may be measuring."""

    @abstractmethod
    def versions(self) -> Mapping[str, str]:
        """Return the versions of what is measured."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect. All ranks call this."""

    @abstractmethod
    def abort(self) -> None:
        """End the other ranks as well, if the library can, because this one has failed."""


def connect(plan: BenchPlan) -> BenchLibrary:
    """Connect this process, as a rank, through the plan's library.

    Raises:
        NetworkError: The library is not installed, or the ranks did not find each other.
    """
    module = importlib.import_module(f"commtrace.network.bench_{'mpi' if plan.through == 'mpi4py' else 'torch'}")
    library: BenchLibrary = module.connect(plan)
    return library
