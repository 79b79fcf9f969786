"""Rows of the groups table for mpi4py's communicators and windows."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final

from mpi4py import MPI

from commtrace.hooks.group_creation import GroupCreations
from commtrace.hooks.groups import Group, GroupDescription, Groups
from commtrace.recording.table_lines import TableLines

# Open MPI's default names, which contain a number that may differ between ranks.
_NO_NAME: Final = re.compile(
    r"MPI[ _](COMMUNICATOR|COMM|WIN)\b.*\d.*(FROM|DUP|SPLIT).*|MPI (COMMUNICATOR|WIN) \d+", re.I
)


creations: Final = GroupCreations()
"""The communicators of this process, by `handle_key`."""


class MpiGroup(Group):
    """The group of a communicator or a window."""

    def __init__(
        self,
        mpi_object: Any,
        number: int,
        row: GroupDescription,
        local: Sequence[int],
        rank: int,
        remote: Sequence[int] | None,
    ) -> None:
        """Describe an mpi4py group with row `number` of the groups table.

        `local` and `remote` are lists of global ranks (-1: in another world); this process is `rank`
        in `local`. `remote` is the remote group of an intercommunicator; None: not one.
        """
        super().__init__(mpi_object, number, row.ranks, rank)
        self.local = local
        self.remote = remote
        self.size = len(local)
        self.own = local[rank]
        self._others = local if remote is None else remote
        self.blocks = len(self._others)
        """Number of shares of a collective: one per rank of the remote group, if any, or of the group."""
        topology = isinstance(mpi_object, MPI.Topocomm)
        self.sources: int = mpi_object.indegree if topology else 0
        """Number of neighbours that this rank receives from in a neighbourhood collective."""
        self.destinations: int = mpi_object.outdegree if topology else 0
        """Number of neighbours that this rank sends to in a neighbourhood collective."""

    def peer(self, rank: int) -> int:
        """Return the global rank of a source, destination, target or root; -1: none, any, or in another world."""
        return self._others[rank] if 0 <= rank < len(self._others) else -1

    def counter(self, peer: int, tag: int, sends: bool) -> Iterator[int]:
        """Return the counter of messages to or from a peer (a global rank)."""
        return self.messages(self.own, peer, tag) if sends else self.messages(peer, self.own, tag)

    def root(self, rank: int) -> int:
        """Return the global rank of a root, which on an intercommunicator may be this rank (MPI.ROOT)."""
        return self.own if rank == MPI.ROOT else self.peer(rank)

    def is_root(self, rank: int) -> bool:
        """Return whether this rank is the given root."""
        return rank == MPI.ROOT if self.remote is not None else rank == self.rank


class MpiGroups(Groups[MpiGroup]):
    """The groups in one recorder's tables, by Python object, and by handle for objects that share one."""

    def __init__(self, tables: TableLines, world: Sequence[int]) -> None:
        """Write to these tables; `world` holds the global ranks of MPI.COMM_WORLD."""
        super().__init__(tables)
        self._world = world
        self._by_handle: dict[tuple[type, int], MpiGroup] = {}
        self._backend = MPI.get_vendor()[0]

    def _make(self, mpi_object: Any) -> MpiGroup:
        key = handle_key(mpi_object)
        group = self._by_handle.get(key)
        if group is None:
            group = self._by_handle[key] = self._new(mpi_object)
        alias = copy.copy(group)  # another object with the same handle has the same row and counters
        alias.ref = weakref.ref(mpi_object)
        return alias

    def _new(self, mpi_object: Any) -> MpiGroup:
        local, rank = self._ranks(mpi_object.Get_group())
        inter = isinstance(mpi_object, MPI.Comm) and mpi_object.Is_inter()
        remote = self._ranks(mpi_object.Get_remote_group())[0] if inter else None
        # Both sides of an intercommunicator write the same row.
        global_ranks = local if remote is None else sorted({*local, *remote})
        known = [global_rank for global_rank in global_ranks if global_rank >= 0]
        create_ns = creations.time_of(handle_key(mpi_object))
        row = GroupDescription(known, _name(mpi_object), _describe(mpi_object), self._backend, create_ns)
        return MpiGroup(mpi_object, self._number(row), row, local, rank, remote)

    def _ranks(self, group: Any) -> tuple[list[int], int]:
        """Return an MPI group's global ranks (-1: in another world) and this process's rank. Free the group."""
        world = MPI.COMM_WORLD.Get_group()
        translated = MPI.Group.Translate_ranks(group, list(range(group.Get_size())), world)
        ranks, own = [self._world[rank] if rank >= 0 else -1 for rank in translated], group.Get_rank()
        world.Free()
        group.Free()
        return ranks, own

    def forget(self, mpi_object: Any) -> None:
        """Forget a communicator or window that is about to be freed: another one may get its handle."""
        self._known.pop(id(mpi_object), None)
        self._by_handle.pop(handle_key(mpi_object), None)


def handle_key(mpi_object: Any) -> tuple[type, int]:
    """Return what identifies a communicator or window while it exists."""
    return _kind(mpi_object), MPI._handleof(mpi_object)  # its attribute `handle` is of mpi4py 4.0 and later


def _kind(mpi_object: Any) -> type:
    return MPI.Win if isinstance(mpi_object, MPI.Win) else MPI.Comm


def _name(mpi_object: Any) -> str:
    name = str(mpi_object.Get_name())
    return "" if _NO_NAME.fullmatch(name) else name


def _describe(mpi_object: Any) -> str:
    if isinstance(mpi_object, MPI.Win):
        return "window"
    if mpi_object.Is_inter():
        return f"intercommunicator, {mpi_object.Get_size()} and {mpi_object.Get_remote_size()} processes"
    topology = {MPI.CART: "Cartesian", MPI.GRAPH: "graph", MPI.DIST_GRAPH: "distributed graph"}
    return topology.get(mpi_object.Get_topology(), "intracommunicator")
