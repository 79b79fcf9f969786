"""torch's process groups as rows of the groups table: global ranks, name, description, role."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from commtrace.tables import Tables


class Group:
    """What a call needs to know of its group."""

    def __init__(self, pg: Any, number: int, ranks: list[int]) -> None:
        self.ref = weakref.ref(pg)  # weakly: a group that is kept alive cannot be destroyed
        self.number = number
        self.ranks = ranks
        self.size: int = pg.size()
        self.rank: int = pg.rank()
        self.collectives: Iterator[int] = itertools.count(_calls_so_far(pg))
        self._messages: dict[tuple[int, int, int], Iterator[int]] = {}

    def global_rank(self, rank: int) -> int:
        """Of a rank within the group; -1 for one that is not known."""
        return self.ranks[rank] if 0 <= rank < len(self.ranks) else -1

    def message(self, source: int, destination: int, tag: int) -> int:
        """Sequence number of the next message on this way (global ranks)."""
        key = source, destination, tag
        return next(self._messages.setdefault(key, itertools.count()))


class Groups:
    """The groups of one recorder's tables, found by process group object."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._known: dict[int, Group] = {}
        self._created: Counter[tuple[tuple[int, ...], str]] = Counter()
        self._lock = threading.RLock()  # between threads that use a new group at the same time

    def of(self, pg: Any) -> Group:
        """The group of a process group, entered into the table when it is new."""
        group = self._known.get(id(pg))
        return group if group is not None and group.ref() is pg else self._enter(pg)

    def _enter(self, pg: Any) -> Group:
        with self._lock:
            group = self._known.get(id(pg))
            if group is None or group.ref() is not pg:
                group = self._known[id(pg)] = Group(pg, *self._row(pg))
        return group

    def _row(self, pg: Any) -> tuple[int, list[int]]:
        ranks, name = global_ranks(pg), str(pg.group_name)
        key = tuple(sorted(ranks)), name
        row = {
            "ranks": ranks,
            "name": name,
            "desc": str(pg.group_desc),
            "index": self._created[key],
            "backend": _backend(pg),
        }
        self._created[key] += 1
        return self._tables.new("groups", row), ranks

    def set_role(self, pg: Any, role: str, source: str) -> None:
        """Somebody who knows says which parallel dimension this group serves."""
        self._tables.number(
            "roles", (self.of(pg).number, role), lambda: {"group": self.of(pg).number, "role": role, "source": source}
        )


def global_ranks(pg: Any) -> list[int]:
    """Global ranks in the group's order. A group that torch.distributed did not make has its own ranks only."""
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
    """torch's own count of the group's collectives, so that ranks that start tracing at different times still match."""
    try:
        return int(pg._get_sequence_number_for_group())
    except RuntimeError:
        return 0  # the backend keeps none
