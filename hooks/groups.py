"""Process groups: their rows in the groups table, and the sequence numbers of their calls."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from commtrace.rank_ranges import format_rank_list
from commtrace.recording.table_lines import TableLines


class Group:
    """A process group: what is needed to record its calls."""

    def __init__(self, library_object: Any, number: int, ranks: Sequence[int], rank: int, first: int = 0) -> None:
        """Describe a group.

        Args:
            library_object: The library's own object. It is kept weakly, so that the program can
                destroy the group.
            number: Its row in the groups table.
            ranks: Global ranks, in the group's order.
            rank: This process's rank within the group.
            first: Sequence number of its next collective.
        """
        self.ref = weakref.ref(library_object)
        self.number = number
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = rank
        self.collectives: Iterator[int] = itertools.count(first)
        self._messages: dict[tuple[int, int, int], Iterator[int]] = {}

    def global_rank(self, rank: int) -> int:
        """Return the global rank of a rank within the group; -1 if it is not known."""
        return self.ranks[rank] if 0 <= rank < len(self.ranks) else -1

    def message(self, source: int, destination: int, tag: int) -> int:
        """Return the sequence number of the next message from one global rank to another with this tag."""
        return next(self.messages(source, destination, tag))

    def messages(self, source: int, destination: int, tag: int) -> Iterator[int]:
        """Return the counter of messages from one global rank to another with this tag."""
        return self._messages.setdefault((source, destination, tag), itertools.count())


class GroupDescription(NamedTuple):
    """A row of the groups table, without its number."""

    ranks: list[int]
    name: str
    desc: str
    backend: str
    create_ns: int | None
    """Time that the library took to create the group; None: not known."""


_Group = TypeVar("_Group", bound=Group)


class Groups(Generic[_Group]):
    """The groups of one library in one recorder's tables, keyed by the library's own object."""

    def __init__(self, tables: TableLines) -> None:
        self._tables = tables
        self._known: dict[int, _Group] = {}
        self._created: Counter[tuple[tuple[int, ...], str]] = Counter()
        self._lock = threading.RLock()  # threads may use a new group at the same time

    def get(self, library_object: Any) -> _Group:
        """Return the group of a library's object. A new group is added to the table."""
        group = self._known.get(id(library_object))
        if group is not None and group.ref() is library_object:
            return group
        with self._lock:
            group = self._known.get(id(library_object))
            if group is None or group.ref() is not library_object:
                group = self._known[id(library_object)] = self._make(library_object)
        return group

    def _make(self, library_object: Any) -> _Group:
        """Make the group of a new object."""
        raise NotImplementedError

    def _number(self, row: GroupDescription) -> int:
        """Add a row and return its number. `index` counts groups with the same ranks and name."""
        key = tuple(sorted(row.ranks)), row.name
        index = self._created[key]
        self._created[key] += 1
        known = {name: value for name, value in row._asdict().items() if value is not None}
        return self._tables.new("groups", {**known, "ranks": format_rank_list(row.ranks), "index": index})

    def set_role(self, library_object: Any, role: str, source: str, table: str = "roles") -> None:
        """Record the parallel dimension of a group, and the source of this information.

        The table is "roles", or "message_roles" if point-to-point messages have a different
        dimension than the group.
        """
        number = self.get(library_object).number
        self._tables.row_id(table, (number, role), lambda: {"group": number, "role": role, "source": source})
