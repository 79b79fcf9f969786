"""Process groups of one process: torch makes them with its fake backend, without a rendezvous.

The groups keep the names of the backends that the program requested, because it may read them. Every rank of a job
creates every group, so one simulated rank has the groups of all ranks (`SimulatedGroups.ranks`).
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


class SimulatedGroups:
    """Patches with which torch makes process groups without other processes.

    `ranks` has the ranks of each group that the program made, in order, except the group of all ranks: torch passes an
    empty list for it.
    """

    def __init__(self, run: str, rank: int, world_size: int) -> None:
        self.ranks: dict[tuple[int, ...], None] = {}
        self._run, self._rank, self._world_size = run, rank, world_size
        self._patches = Patches()

    def install(self) -> None:
        """Install the patches."""
        self._patches.wrap(distributed_c10d, "_new_process_group_helper", self._new_group)
        self._patches.wrap(distributed_c10d, "rendezvous", self._rendezvous)
        self._patches.wrap(distributed_c10d, "_store_based_barrier", _no_barrier)

    def uninstall(self) -> None:
        """Restore torch's functions."""
        self._patches.undo()

    def _new_group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _new_process_group_helper(
            size: int, rank: int, ranks: list[int], backend: Any, store: Any, group_name: Any, **options: Any
        ) -> Any:
            if ranks:
                self.ranks.setdefault(tuple(ranks))
            if size < 0:  # the MPI backend, which determines both itself
                size, rank = self._world_size, self._rank
            # Options of the real backend do not fit the fake one.
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
            yield HashStore(), rank if rank >= 0 else self._rank, world_size if world_size > 0 else self._world_size

        return rendezvous


def _no_barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *_, **__: None  # there are no other processes to wait for
