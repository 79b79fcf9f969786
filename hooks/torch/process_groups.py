"""Rows of the groups table for torch's process groups."""

from __future__ import annotations

import threading
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from commtrace.errors import warn
from commtrace.hooks.group_creation import GroupCreations
from commtrace.hooks.groups import Group, GroupDescription, Groups
from commtrace.recording.table_lines import TableLines

creations: Final = GroupCreations()
"""The groups of this process, by name."""

UNREGISTERED: Final = "unregistered"
"""Name of a group unknown to torch.distributed: only size and this process's position are known."""


class ThreadedRanksError(Exception):
    """The ranks are threads of one process. A log can hold only one of them."""


class TorchGroups(Groups[Group]):
    """The process groups in one recorder's tables."""

    def __init__(self, tables: TableLines, rank: int) -> None:
        """Write to the tables of this rank."""
        super().__init__(tables)
        self._rank = rank
        self._owners: dict[str, tuple[int, int]] = {}
        self._refused: set[int] = set()

    def _make(self, pg: Any) -> Group:
        ranks, position = _global_ranks(pg), pg.rank()
        name = str(pg.group_name) if ranks else UNREGISTERED
        self._refuse_other_ranks("registered" if ranks else name, ranks[position] if ranks else position)
        ranks = ranks or likely_ranks(pg.size(), position, self._rank)
        row = GroupDescription(ranks, name or UNREGISTERED, str(pg.group_desc), _backend(pg), creations.time_of(name))
        return Group(pg, self._number(row), row.ranks, position, _calls_so_far(pg))

    def _refuse_other_ranks(self, groups: str, rank: int) -> None:
        """Raise ThreadedRanksError if another thread has made calls as another rank of such groups."""
        thread = threading.get_ident()
        owner, owner_thread = self._owners.setdefault(groups, (rank, thread))
        if owner == rank or owner_thread == thread:
            return
        text = f"ranks are threads of one process: rank {owner} is recorded, rank {rank} is not"
        if rank not in self._refused:
            self._refused.add(rank)
            warn(text)
        raise ThreadedRanksError(text)


def _global_ranks(pg: Any) -> list[int]:
    """Return global ranks in the group's order; [] if torch.distributed did not make the group."""
    try:
        return list(dist.get_process_group_ranks(pg))
    except (KeyError, RuntimeError, ValueError):
        return []


def likely_ranks(size: int, position: int, rank: int) -> list[int]:
    """Return likely ranks of a group: consecutive, with this process's rank at its position.

    Its own rank shows whether the process is the root of a call.
    """
    if rank >= position:
        return list(range(rank - position, rank - position + size))
    ranks = list(range(size))
    ranks[position], ranks[rank] = rank, position
    return ranks


def _backend(pg: Any) -> str:
    try:
        return str(dist.get_backend_config(pg))
    except (KeyError, RuntimeError, TypeError, ValueError, AssertionError):
        return str(distributed_c10d._world.pg_backend_config.get(pg, "unknown"))


def _calls_so_far(pg: Any) -> int:
    """Return torch's count of the group's collectives, so that ranks that start tracing at different times match."""
    try:
        return int(pg._get_sequence_number_for_group())
    except RuntimeError:
        return 0  # the backend does not count
