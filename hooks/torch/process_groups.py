"""Rows of the groups table for torch's process groups."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from commtrace.hooks.groups import Group, GroupDescription, Groups


class TorchGroups(Groups[Group]):
    """The process groups in one recorder's tables."""

    def _make(self, pg: Any) -> Group:
        row = GroupDescription(global_ranks(pg), str(pg.group_name), str(pg.group_desc), _backend(pg))
        return Group(pg, self._number(row), row.ranks, pg.rank(), _calls_so_far(pg))


def global_ranks(pg: Any) -> list[int]:
    """Return global ranks in the group's order; for a group that torch.distributed did not make, 0 to size - 1."""
    try:
        return list(dist.get_process_group_ranks(pg))
    except (KeyError, RuntimeError, ValueError):
        return list(range(pg.size()))


def _backend(pg: Any) -> str:
    try:
        return str(dist.get_backend_config(pg))
    except (KeyError, RuntimeError, ValueError, AssertionError):
        return str(distributed_c10d._world.pg_backend_config.get(pg, "unknown"))


def _calls_so_far(pg: Any) -> int:
    """Return torch's count of the group's collectives, so that ranks that start tracing at different times match."""
    try:
        return int(pg._get_sequence_number_for_group())
    except RuntimeError:
        return 0  # the backend does not count
