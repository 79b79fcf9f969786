"""Rows of the groups table: global ranks, name, description, role; and the calls that a group has made so far."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from commtrace.recording.table_writer import TableWriter


class Group:
    """What a call needs to know of its group."""

    def __init__(self, members: Any, number: int, ranks: Sequence[int], rank: int, first: int = 0) -> None:
        """`members` is the library's own object; `ranks` are global, `rank` is within them, `first` the next `seq`."""
        self.ref = weakref.ref(members)  # weakly: a group that is kept alive cannot be destroyed
        self.number = number
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = rank
        self.collectives: Iterator[int] = itertools.count(first)
        self._messages: dict[tuple[int, int, int], Iterator[int]] = {}

    def global_rank(self, rank: int) -> int:
        """Of a rank within the group; -1 for one that is not known."""
        return self.ranks[rank] if 0 <= rank < len(self.ranks) else -1

    def message(self, source: int, destination: int, tag: int) -> int:
        """Sequence number of the next message on this way (global ranks)."""
        return next(self.messages(source, destination, tag))

    def messages(self, source: int, destination: int, tag: int) -> Iterator[int]:
        """Sequence numbers of the messages on this way (global ranks)."""
        return self._messages.setdefault((source, destination, tag), itertools.count())


class GroupRow(NamedTuple):
    """What the groups table says of a group, but for its number."""

    ranks: list[int]
    name: str
    desc: str
    backend: str


_Group = TypeVar("_Group", bound=Group)


class Groups(Generic[_Group]):
    """The groups of one library in one recorder's tables, found by the library's own object."""

    def __init__(self, tables: TableWriter) -> None:
        self._tables = tables
        self._known: dict[int, _Group] = {}
        self._created: Counter[tuple[tuple[int, ...], str]] = Counter()
        self._lock = threading.RLock()  # between threads that use a new group at the same time

    def of(self, members: Any) -> _Group:
        """The group of such an object, entered into the table when it is new."""
        group = self._known.get(id(members))
        return group if group is not None and group.ref() is members else self._enter(members)

    def _enter(self, members: Any) -> _Group:
        with self._lock:
            group = self._known.get(id(members))
            if group is None or group.ref() is not members:
                group = self._known[id(members)] = self._make(members)
        return group

    def _make(self, members: Any) -> _Group:
        """The group of an object that is met for the first time."""
        raise NotImplementedError

    def _number(self, row: GroupRow) -> int:
        """Of a new row. Names repeat after a group is destroyed: the n-th of the same ranks and name is told apart."""
        key = tuple(sorted(row.ranks)), row.name
        index = self._created[key]
        self._created[key] += 1
        return self._tables.new(
            "groups",
            {"ranks": row.ranks, "name": row.name, "desc": row.desc, "index": index, "backend": row.backend},
        )

    def set_role(self, members: Any, role: str, source: str) -> None:
        """Somebody who knows says which parallel dimension this group serves."""
        number = self.of(members).number
        self._tables.number("roles", (number, role), lambda: {"group": number, "role": role, "source": source})

    def set_message_role(self, members: Any, role: str, source: str) -> None:
        """The same of its messages from rank to rank alone, where they serve another dimension."""
        number = self.of(members).number
        row = {"group": number, "role": role, "source": source}
        self._tables.number("message_roles", (number, role), lambda: row)
