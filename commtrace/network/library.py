"""What a library that communicates must give for being measured."""

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
        """These ranks as a group; None where this one is not among them. All ranks call this, in the same order."""

    @abstractmethod
    def everyone(self, value: Any) -> list[Any]:
        """The value of every rank, on all of them: small objects."""

    @abstractmethod
    def wait(self) -> None:
        """For all ranks, without keeping a core busy: others of this host may be measuring."""

    @abstractmethod
    def facts(self) -> Mapping[str, str]:
        """Versions of what is measured."""

    @abstractmethod
    def close(self) -> None:
        """Leave; all ranks do."""

    @abstractmethod
    def abort(self) -> None:
        """End the other ranks, too, where the library can: this one has failed."""


def connect(plan: BenchPlan) -> BenchLibrary:
    """This process as a rank. Raises NetworkError where the plan's library cannot be had."""
    module = importlib.import_module(f"commtrace.network.{'mpi' if plan.through == 'mpi4py' else 'torch'}_library")
    library: BenchLibrary = module.connect(plan)
    return library
