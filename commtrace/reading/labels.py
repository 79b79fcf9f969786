"""What the numbers in records mean, in words that are the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from commtrace.formatting import format_ranks
from commtrace.schema import ROLES, Flag, Phase, State
from commtrace.volume import wire_bytes

from .group_roles import role_from_description
from .log import Log, Process
from .table_reader import Group, Site, integer_or_none

Array: TypeAlias = npt.NDArray[Any]

UNKNOWN: Final = "unknown"
"""What a number without a row in the tables is called."""

# Columns of the normal form that are numbers in a record and words outside: the field that holds the number.
LABEL_COLUMNS: Final = {
    "op": "kind",
    "variant": "kind",
    "api": "kind",
    "dtype": "kind",
    "group": "group",
    "group_ranks": "group",
    "role": "role",  # of the group, and for messages from rank to rank of their own (`Names.numbers`)
    "site": "site",
    "phase": "phase",
    "state": "state",
    "flags": "flags",
}
_MESSAGES: Final = 1 << 32
"""Added to a group's number where it is asked for the role of its messages."""
_POINT_TO_POINT: Final = ("send", "recv")
_FLAGS: Final = ["|".join(str(flag.name).lower() for flag in Flag if bits & flag.value) for bits in range(256)]


class Fields(Protocol):
    """Records, or columns of them."""

    def __len__(self) -> int:
        """How many."""

    def __getitem__(self, name: str, /) -> Array:
        """A field of all of them."""


class RecordLabels:
    """What the numbers in the records of one process mean. Small, and picklable for worker processes.

    `number` is the position of the process in `Log.processes`. `unix_minus_mono_ns` makes a moment on the wall clock of
    one on the monotonic clock, None where the process does not tell.
    """

    def __init__(
        self,
        number: int,
        process: Process,
        roles: Mapping[Group, str],
        files: Mapping[str, str],
        message_roles: Mapping[Group, str] | None = None,
    ) -> None:
        self.number = number
        self.rank = process.rank
        tables = process.tables
        moments = [integer_or_none(tables.process.get(name)) for name in ("unix_ns", "mono_ns")]
        self.unix_minus_mono_ns = None if moments[0] is None or moments[1] is None else moments[0] - moments[1]
        self._ids: dict[str, Array] = {}
        self._values: dict[str, Array] = {}
        kinds, groups, sites = tables.kinds, tables.groups, {0: None, **tables.sites}
        self._add(
            "kind",
            kinds,
            {name: [getattr(kind, name) for kind in kinds.values()] for name in ("op", "variant", "api", "dtype")},
        )
        self._add("group", groups, {
            "group": [group_label(group) for group in groups.values()],
            "group_ranks": [format_ranks(group.ranks) for group in groups.values()],
        })  # fmt: skip
        told = {number: roles.get(group, UNKNOWN) for number, group in groups.items()}
        messages = {number | _MESSAGES: (message_roles or {}).get(group) for number, group in groups.items()}
        told |= {number: role for number, role in messages.items() if role is not None}
        self._add("role", told, {"role": [*told.values()]})
        self._add(
            "site", sites, {"site": ["" if site is None else _site_label(site, files) for site in sites.values()]}
        )
        self._add("phase", Phase, {"phase": [phase.name.lower() for phase in Phase]})
        self._add("state", State, {"state": [state.name.lower() for state in State]})
        self._add("flags", range(256), {"flags": _FLAGS})
        self._sizes = np.array([len(groups[number].ranks) for number in sorted(groups)] + [0])
        self._operations, self._operation = np.unique(self._values["op"].astype(str), return_inverse=True)
        self._message_groups = np.array([number ^ _MESSAGES for number in told if number & _MESSAGES], np.int64)
        self._point_to_point = np.isin(self._values["op"].astype(str), _POINT_TO_POINT)

    def _add(self, field: str, ids: Iterable[int], columns: dict[str, list[str]]) -> None:
        numbers = np.array([*ids], np.int64)
        order = np.argsort(numbers)
        self._ids[field] = numbers[order]
        for column, values in columns.items():
            words = np.empty(len(numbers) + 1, object)
            words[:-1] = np.array(values, object)[order] if values else ()
            words[-1] = UNKNOWN
            self._values[column] = words

    def index(self, field: str, numbers: Array) -> Array:
        """Positions of the numbers among `words` of the field's columns."""
        ids = self._ids[field]
        if not len(ids):
            return np.zeros(len(numbers), np.int64)
        found = np.minimum(np.searchsorted(ids, numbers), len(ids) - 1)
        return np.where(ids[found] == numbers, found, len(ids))

    def categories(self, column: str) -> Array:
        """All words of a column; the last is for numbers without a row."""
        return self._values[column]

    def ids(self, column: str, records: Fields) -> Array:
        """What stands for a column of WORDS in each of the records: numbers for `name` and `index`."""
        if column != "role":
            return records[LABEL_COLUMNS[column]]
        groups = records["group"].astype(np.int64)
        if not len(self._message_groups):
            return groups
        messages = self._point_to_point[self.index("kind", records["kind"])]
        return np.where(messages & np.isin(groups, self._message_groups), groups | _MESSAGES, groups)

    def text(self, column: str, numbers: Array) -> Array:
        """The words of a column of WORDS for these numbers."""
        words: Array = self._values[column][self.index(LABEL_COLUMNS[column], numbers)]
        return words

    def group_sizes(self, groups: Array) -> Array:
        """Members of each of these groups, 0 where they are not known."""
        sizes: Array = self._sizes[self.index("group", groups)]
        return sizes

    def by_operation(self, kinds: Array) -> Iterator[tuple[str, Array]]:
        """Each operation among these kinds, with the positions of its kinds."""
        found = self._operation[self.index("kind", kinds)]
        for code in np.flatnonzero(np.bincount(found, minlength=len(self._operations))):
            yield str(self._operations[code]), np.flatnonzero(found == code)

    def wire_bytes(self, records: Fields) -> Array:
        """Bytes that this rank must at least send for each record (float), nan where the log does not tell."""
        result = np.full(len(records), np.nan)
        # Columns first: a record takes more than a cache line, so picking records would move all of it.
        payload, local = np.ascontiguousarray(records["payload"]), np.ascontiguousarray(records["local"])
        sizes = self.group_sizes(records["group"]).astype(float)
        sizes[sizes == 0] = np.nan
        mine = (records["peer"] == self.rank) & (self.rank >= 0)
        for op, at in self.by_operation(records["kind"]):
            to_self = mine[at] if op in ("send", "sendrecv", "put", "accumulate") else 0
            try:
                result[at] = wire_bytes(op, payload[at], local[at], sizes[at], is_root=mine[at], to_self=to_self)
            except ValueError:  # an operation without a wire rule
                continue
        return result


def group_label(group: Group) -> str:
    """One name for a group on all its ranks: ranks, the library's name, and a number where that was used again."""
    return (
        format_ranks(group.ranks)
        + (f"/{group.name}" if group.name else "")
        + (f"#{group.index}" if group.index else "")
    )


def _site_label(site: Site, files: Mapping[str, str]) -> str:
    return f"{files.get(site.file, site.file)}:{site.line} {site.function}".rstrip()


def short_paths(files: Iterable[str]) -> dict[str, str]:
    """Each path without what leads to its package; the whole path where two would become one."""
    short = {file: _short_path(file) for file in files}
    taken = pd.Series(list(short.values()), dtype=object).value_counts()
    return {file: name if taken[name] == 1 else file for file, name in short.items()}


def _short_path(file: str) -> str:
    parts = file.replace("\\", "/").split("/")
    for mark in ("site-packages", "dist-packages"):
        if mark in parts[:-1]:
            return "/".join(parts[len(parts) - parts[::-1].index(mark) :])
    return "/".join(parts[-2:])


def roles_of(log: Log) -> dict[Group, str]:
    """What each group of the run serves: what a rank was told of it, else its description, else its members."""
    roles: dict[Group, str] = {}
    everyone = tuple(range(log.world_size)) if log.world_size else None
    for process in log.processes:
        for number, group in process.tables.groups.items():
            told = process.tables.roles.get(number)
            if len(group.ranks) == 1:
                roles[group] = "self"
            elif told in ROLES:
                roles.setdefault(group, told)
    for process in log.processes:
        for number, group in process.tables.groups.items():
            says = role_from_description(process.tables.descriptions.get(number, ""))
            if says is not None:
                roles.setdefault(group, says)
    for process in log.processes:
        for group in process.tables.groups.values():
            roles.setdefault(group, "world" if group.ranks == everyone else UNKNOWN)
    return roles


def message_roles_of(log: Log) -> dict[Group, str]:
    """What messages from rank to rank serve, of the groups of which a rank was told so."""
    return {
        process.tables.groups[number]: role
        for process in log.processes
        for number, role in process.tables.message_roles.items()
        if number in process.tables.groups and role in ROLES
    }
