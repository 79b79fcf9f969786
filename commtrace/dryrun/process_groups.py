"""Process groups without processes: made as torch makes them, with its fake backend below, and nobody to find.

The groups keep the names of the backends that the program asked for, which it may look at. Every rank of a job is told
of every group, so that one simulated rank knows how all the others are divided: `GroupTopology`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

from commtrace.patching import Patches

_FAKE = distributed_c10d.Backend(distributed_c10d.Backend.FAKE)


class GroupTopology:
    """The groups that were made, in order, each once."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], None] = {}

    def add(self, ranks: list[int]) -> None:
        """A group was made; without ranks that of the whole world, which says nothing."""
        if ranks:
            self._groups.setdefault(tuple(ranks))

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self._groups)


class SimulatedGroups:
    """What of torch is replaced so that groups need nobody."""

    def __init__(self, run: str, rank: int, world_size: int, topology: GroupTopology) -> None:
        self._run, self._rank, self._world_size, self._topology = run, rank, world_size, topology
        self._patches = Patches()

    def install(self) -> None:
        """For every group from now on."""
        self._patches.wrap(distributed_c10d, "_new_process_group_helper", self._new_group)
        self._patches.wrap(distributed_c10d, "rendezvous", self._rendezvous)
        self._patches.wrap(distributed_c10d, "_store_based_barrier", _nobody)

    def uninstall(self) -> None:
        """As torch has it."""
        self._patches.undo()

    def _new_group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _new_process_group_helper(
            size: int, rank: int, ranks: list[int], backend: Any, store: Any, group_name: Any, **options: Any
        ) -> Any:
            self._topology.add(ranks)
            if size < 0:  # MPI knows them itself
                size, rank = self._world_size, self._rank
            # What is meant for another backend is not for this one.
            options.update(backend_options=None, device_id=None)
            group, prefix_store = original(size, rank, ranks, _FAKE, store, group_name, **options)
            if isinstance(group, dist.ProcessGroup):
                world = distributed_c10d._world
                world.pg_map[group] = backend, prefix_store
                world.pg_backend_config[group] = str(distributed_c10d.BackendConfig(backend))
                if not ranks:
                    prefix_store.set("commtrace/run", self._run)
            return group, prefix_store

        return _new_process_group_helper

    def _rendezvous(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def rendezvous(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[tuple[Any, int, int]]:
            own, all_of_them = rank if rank >= 0 else self._rank, world_size if world_size > 0 else self._world_size
            yield HashStore(), own, all_of_them

        return rendezvous


def _nobody(original: Callable[..., Any]) -> Callable[..., Any]:
    def _store_based_barrier(*_: Any, **__: Any) -> None:
        """There is nobody to wait for."""

    return _store_based_barrier
