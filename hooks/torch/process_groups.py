"""Rows of the groups table for torch's process groups."""

from __future__ import annotations

import threading
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from commtrace.hooks.groups import Group, GroupDescription, Groups
from commtrace.recording.log_writer import warn
from commtrace.recording.table_writer import TableWriter

UNREGISTERED: Final = "unregistered"
"""Name of a group that torch.distributed does not know: its ranks are positions in the group."""


class ThreadedRanksError(Exception):
    """Ranks are threads of one process, of which a log can hold one."""


class TorchGroups(Groups[Group]):
    """The process groups in one recorder's tables."""

    def __init__(self, tables: TableWriter) -> None:
        """Write to these tables."""
        super().__init__(tables)
        self._owner: tuple[int, int] | None = None
        self._refused: set[int] = set()

    def _make(self, pg: Any) -> Group:
        row = GroupDescription(global_ranks(pg), str(pg.group_name) or UNREGISTERED, str(pg.group_desc), _backend(pg))
        self._refuse_other_ranks(row.ranks[pg.rank()])
        return Group(pg, self._number(row), row.ranks, pg.rank(), _calls_so_far(pg))

    def _refuse_other_ranks(self, rank: int) -> None:
        """Raise ThreadedRanksError if another thread of this process has made calls as another rank."""
        thread = threading.get_ident()
        self._owner = self._owner or (rank, thread)
        if self._owner[0] == rank or self._owner[1] == thread:
            return
        text = f"ranks are threads of one process: rank {self._owner[0]} is recorded, rank {rank} is not"
        if rank not in self._refused:
            self._refused.add(rank)
            warn(text)
        raise ThreadedRanksError(text)


def global_ranks(pg: Any) -> list[int]:
    """Return global ranks in the group's order; for a group that torch.distributed did not make, 0 to size - 1."""
    try:
        return list(dist.get_process_group_ranks(pg))
    except (KeyError, RuntimeError, ValueError):
        return list(range(pg.size()))


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
