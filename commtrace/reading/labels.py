"""Labels: the meaning of the numbers in records, as text that is the same on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import IntEnum
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from commtrace.library_frames import path_below_packages
from commtrace.operations import MESSAGES
from commtrace.rank_ranges import format_rank_list
from commtrace.schema import ROLES, Fields, Phase, State, flags_label
from commtrace.volume import wire_bytes

from .log import Log
from .process_reader import Process
from .roles_by_name import role_from_description, role_from_purpose
from .table_reader import ProcessTables, RecordedGroup, Site, integer_or_none

Array: TypeAlias = npt.NDArray[Any]

UNKNOWN: Final = "unknown"
"""Label of an id without a row in the tables."""
ROOT: Final = "(root)"
"""Place of a model itself, whose name is empty."""
NOT_RECORDED: Final = "not recorded"
"""Purpose of calls of which none was recorded."""

_UNDECIDED: Final = ("world", UNKNOWN)
"""Roles of groups that no dimension uses alone."""

_UNKNOWN_SIZES: Final = (("payload",), ("payload", "own share"))
"""Values of `Kind.sizes` of calls whose payload, and whose own share, is not known."""

_DENSE: Final = 1024
"""Unused ids that a table for looking up ids may have, besides one for each used id."""

_KIND_LABELS: Final = ("op", "variant", "api", "dtype", "reduce_op")
# Columns of the event table that are text there and ids in records, with the record field of the id.
LABEL_COLUMNS: Final = {
    **dict.fromkeys(("op", "variant", "api", "dtype"), "kind"),
    **dict.fromkeys(("group", "group_ranks"), "group"),
    # role: of the group, of its point-to-point messages, or of the purpose in a shared group (`RunLabels.ids`)
    **{name: name for name in ("role", "site", "phase", "state", "flags")},
    "purpose": "site",
}
TEXT_FIELDS: Final = {**LABEL_COLUMNS, "place": "site", "reduce_op": "kind"}
"""The same for all columns of labels, with those that the event table does not have."""


class RunLabels:
    """Labels of the ids of a run. `ProcessIds` converts the ids in the records of a process to them.

    The ids of kinds, groups and sites are 1 to n; n + 1 represents ids without a row in the tables of a process.

    Attributes:
        processes: The ids of each process. Empty in worker processes, which get those that they need with each part.
        kinds: The kinds of the run, by id.
        groups: The groups of the run, by id.
        sites: The call sites of the run, by id; 0 represents calls without one.
        files: Displayed names of the files of call sites, by path.
        clock_offsets: Wall clock minus monotonic clock of each process in ns, by number; None where not recorded.
    """

    def __init__(self, log: Log) -> None:
        numbers: dict[str, dict[Any, int]] = {"kind": {}, "group": {}, "site": {}}
        for process in log.processes:
            for field, rows in _rows_by_field(process.tables).items():
                for row in rows.values():
                    numbers[field].setdefault(row, len(numbers[field]) + 1)
        self.processes = tuple(ProcessIds(number, process, numbers) for number, process in enumerate(log.processes))
        self.clock_offsets = [_clock_offset(process.tables.process) for process in log.processes]
        self.kinds, self.groups, self.sites = (
            {number: row for row, number in field.items()} for field in numbers.values()
        )
        self.files = short_paths({line.file for site in self.sites.values() for line in site.lines()})
        kinds, groups = self.kinds.values(), self.groups.values()
        roles, message_roles = roles_of(log), message_roles_of(log)
        role_labels = _by_id(roles.get(group, UNKNOWN) for group in groups)
        self._role_of_messages = np.arange(len(role_labels))
        """Id of the role of point-to-point messages, by group."""
        with_messages = [numbers["group"][group] for group in message_roles]
        self._role_of_messages[with_messages] = len(role_labels) + np.arange(len(message_roles))
        first_role = len(role_labels) + len(message_roles)
        """Id of the first of ROLES, whatever the group."""
        self._roles_in_shared = _SharedGroups(log, roles, numbers["group"], self.sites, first_role)
        self._labels: dict[str, Array] = {
            **{name: _by_id(getattr(kind, name) for kind in kinds) for name in _KIND_LABELS},
            "group": _by_id(group_label(group) for group in groups),
            "group_ranks": _by_id(group.ranks_label for group in groups),
            "role": np.array([*role_labels, *message_roles.values(), *ROLES], object),
            "site": _by_id((site.label(self.files) for site in self.sites.values()), first=""),
            "purpose": _by_id(map(_purpose_label, self.sites.values()), first=NOT_RECORDED),
            "place": _by_id(map(_place_label, self.sites.values()), first=""),
            "phase": _member_labels(Phase),
            "state": _member_labels(State),
            "flags": np.array([*map(flags_label, range(256))], object),
        }
        self._codes: dict[str, tuple[Array, Array]] = {}
        self._sizes = np.array([0, *(len(group.ranks) for group in groups), 0])
        self._operations, self._operation = self._coded("op")
        self._point_to_point = np.isin(self._labels["op"].astype(str), MESSAGES)
        sizes = _by_id(kind.sizes for kind in kinds)
        self._payload_unknown, self._share_unknown = (np.isin(sizes.astype(str), names) for names in _UNKNOWN_SIZES)

    def __getstate__(self) -> dict[str, Any]:
        """Return what worker processes need."""
        return {**self.__dict__, "processes": ()}

    def categories(self, column: str) -> Array:
        """Return the labels of a column by id, as an object array."""
        return self._labels[column]

    def ids(self, column: str, records: Fields) -> Array:
        """Return the ids of records in a column of TEXT_FIELDS, shape (n,)."""
        if column != "role":
            return records[TEXT_FIELDS[column]]
        messages = self._point_to_point[records["kind"]]
        ids = np.where(messages, self._role_of_messages[records["group"]], records["group"])
        return self._roles_in_shared.replace(ids, records)

    def text(self, column: str, ids: Array) -> Array:
        """Return the labels of ids, shape (n,), in a column of TEXT_FIELDS."""
        return np.asarray(self._labels[column][ids])

    def codes(self, column: str, ids: Array) -> Array:
        """Return the indices of the labels of ids in `distinct`, int64, shape (n,)."""
        return np.asarray(self._coded(column)[1][ids])

    def distinct(self, column: str) -> Array:
        """Return the distinct labels of a column, ascending, as an object array; `codes` are indices into it."""
        return self._coded(column)[0]

    def extend(self, earlier: RunLabels) -> bool:
        """Return whether these are labels of a later state of a log: none has changed, some may have been added."""
        for field, rows, before in (
            ("kind", self.kinds, earlier.kinds),
            ("group", self.groups, earlier.groups),
            ("site", self.sites, earlier.sites),
        ):
            numbers = {row: number for number, row in rows.items()}
            if not {*before.values()} <= numbers.keys():
                return False
            ids, now = np.array([*before], np.int64), np.array([numbers[row] for row in before.values()], np.int64)
            columns = [name for name, of in TEXT_FIELDS.items() if of == field]
            if any((earlier.text(name, ids) != self.text(name, now)).any() for name in columns):
                return False
            if field == "group" and (earlier._group_roles(ids) != self._group_roles(now)).any():
                return False
        return True

    def _group_roles(self, groups: Array) -> Array:
        """Return the labels of the roles of groups, and of their messages, shape (2, n)."""
        roles = self._labels["role"]
        return np.stack([roles[groups], roles[self._role_of_messages[groups]]])

    def _coded(self, column: str) -> tuple[Array, Array]:
        """Return the distinct labels of a column, ascending, and the index in them of each of `categories`."""
        if column not in self._codes:
            labels, codes = np.unique(self._labels[column].astype(str), return_inverse=True)
            self._codes[column] = labels.astype(object), codes
        return self._codes[column]

    def group_sizes(self, groups: Array) -> Array:
        """Return the sizes of groups, given by id; 0 where a size is not known."""
        return np.asarray(self._sizes[groups])

    def by_operation(self, kinds: Array) -> Iterator[tuple[str, Array]]:
        """Yield each operation among kinds, with the indices of its kinds."""
        codes = self._operation[kinds]
        for code in np.flatnonzero(np.bincount(codes, minlength=len(self._operations))):
            yield str(self._operations[code]), np.flatnonzero(codes == code)

    def payload_unknown(self, kinds: Array) -> Array:
        """Return whether the payload of calls of each kind is not known, bool, shape (n,)."""
        return np.asarray(self._payload_unknown[kinds])

    def wire_bytes(self, records: Fields) -> Array:
        """Return the wire bytes of each record, float64 of shape (n,); NaN where they cannot be computed."""
        result = np.full(len(records), np.nan)
        # Contiguous columns first: a record is longer than a cache line, so indexing records would load all of it.
        payload, local = np.ascontiguousarray(records["payload"]), np.ascontiguousarray(records["local"])
        sizes = self.group_sizes(records["group"]).astype(float)
        sizes[sizes == 0] = np.nan
        peer_is_self = (records["peer"] == records["rank"]) & (records["rank"] >= 0)
        for op, at in self.by_operation(records["kind"]):
            with suppress(ValueError):  # an operation without a wire rule
                result[at] = wire_bytes(op, payload[at], local[at], sizes[at], peer_is_self=peer_is_self[at])
        result[self._share_unknown[records["kind"]]] = np.nan
        return result


class ProcessIds:
    """Conversion of the ids in the records of one process to those of `RunLabels`.

    Attributes:
        number: Position of the process in `Log.processes`.
        rank: Its rank, -1 where not known.
    """

    def __init__(self, number: int, process: Process, numbers: Mapping[str, Mapping[Any, int]]) -> None:
        self.number, self.rank = number, process.rank
        self._ids: dict[str, tuple[Array, Array]] = {}
        self._by_id: dict[str, Array] = {}
        for field, rows in _rows_by_field(process.tables).items():
            ids = {id_: numbers[field][row] for id_, row in rows.items()}
            if field == "site":
                ids.setdefault(0, 0)  # not recorded
            known = sorted(ids)
            unknown = len(numbers[field]) + 1
            if known and known[0] >= 0 and known[-1] <= 2 * len(known) + _DENSE:  # as recorders number rows: look up
                self._by_id[field] = np.full(known[-1] + 2, unknown, np.int64)
                self._by_id[field][known] = [ids[id_] for id_ in known]
                continue
            self._ids[field] = np.array(known, np.int64), np.array([*(ids[id_] for id_ in known), unknown], np.int64)

    def run_ids(self, field: str, ids: Array) -> Array:
        """Return the run's ids, int64, shape (n,), for those in the field "kind", "group" or "site" of records."""
        if (by_id := self._by_id.get(field)) is not None:
            return np.asarray(by_id[np.minimum(ids, len(by_id) - 1)])
        known, run_ids = self._ids[field]
        return np.asarray(run_ids[_positions(known, ids)])


class _SharedGroups:
    """Groups that several parallel dimensions use: the purpose of a call decides which one it serves."""

    def __init__(
        self,
        log: Log,
        roles: Mapping[RecordedGroup, str],
        numbers: Mapping[RecordedGroup, int],
        sites: Mapping[int, Site],
        first_role: int,
    ) -> None:
        world, shared = _world(log), shared_groups(log, roles)
        self._row = np.full(len(numbers) + 2, -1)
        """Row of each group in `_roles`; -1: the group is not shared."""
        self._row[[numbers[group] for group in shared]] = np.arange(len(shared))
        self._roles = np.zeros((len(shared), len(sites) + 2), np.int64)
        """Id of the role by shared group and site."""
        for row, (group, dimensions) in enumerate(shared.items()):
            undecided = "world" if group.members == world else UNKNOWN
            self._roles[row] = first_role + ROLES.index(roles.get(group, UNKNOWN))  # no purpose was recorded
            for site, purpose in ((site, row.purpose) for site, row in sites.items() if row.purpose is not None):
                name = str(dict(purpose.facts).get("of", purpose.name))
                role = role_from_purpose(name, dimensions) or undecided
                self._roles[row, site] = first_role + ROLES.index(role)

    def replace(self, ids: Array, records: Fields) -> Array:
        """Return ids of roles in which those of calls in shared groups are replaced."""
        if not len(self._roles):
            return ids
        rows = self._row[records["group"]]
        shared = (rows >= 0) & (ids == records["group"])  # not messages with a role of their own
        ids[shared] = self._roles[rows[shared], records["site"][shared]]
        return ids


def _by_id(labels: Iterable[str], first: str = UNKNOWN) -> Array:
    """Return labels by id: `first`, one for each id from 1 on, and one for ids without a row."""
    return np.array([first, *labels, UNKNOWN], object)


def _member_labels(kind: type[IntEnum]) -> Array:
    """Return the names of an enumeration's members by value, up to 255: a damaged summary may have any byte."""
    names = {member.value: member.name.lower() for member in kind}
    return np.array([names.get(value, UNKNOWN) for value in range(256)], object)


def _rows_by_field(tables: ProcessTables) -> dict[str, Mapping[int, Any]]:
    return {"kind": tables.kinds, "group": tables.groups, "site": tables.sites}


def _positions(known: Array, ids: Array) -> Array:
    """Return the index of each id in `known`, which is ascending; its length for an id that is not in it."""
    if not len(known):
        return np.zeros(len(ids), np.int64)
    positions = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    return np.where(known[positions] == ids, positions, len(known))


def _clock_offset(process: Mapping[str, object]) -> int | None:
    unix, mono = (integer_or_none(process.get(name)) for name in ("unix_ns", "mono_ns"))
    return None if unix is None or mono is None else unix - mono


def _purpose_label(site: Site) -> str:
    return NOT_RECORDED if site.purpose is None else site.purpose.name


def _place_label(site: Site) -> str:
    """Return what the purpose of calls is about, such as "layers.0.attention, P -> R", "bucket 3" or "stage 1"."""
    facts = dict(site.purpose.facts) if site.purpose is not None else {}
    parts = [str(facts["module"]) or ROOT] if "module" in facts else []
    parts += [f"{name} {facts[name]}" for name in ("bucket", "stage") if name in facts]
    parts += [f"{facts['from']} -> {facts['to']}"] if {"from", "to"} <= {*facts} else []
    return ", ".join(parts)


def group_label(group: RecordedGroup) -> str:
    """Return a label that is the same on all ranks: ranks, the library's name, and a number where that name repeats."""
    name, index = f"/{group.name}" if group.name else "", f"#{group.index}" if group.index else ""
    return group.ranks_label + name + index


def short_paths(files: Iterable[str]) -> dict[str, str]:
    """Shorten each path to the part below site-packages, else to its last two parts, unless two become equal."""
    short = {}
    for file in files:
        path = file.replace("\\", "/")
        short[file] = path_below_packages(path) or "/".join(path.split("/")[-2:])
    count = Counter(short.values())
    return {file: name if count[name] == 1 else file for file, name in short.items()}


def roles_of(log: Log) -> dict[RecordedGroup, str]:
    """Return the role of each group: as a rank recorded it, else from its description, else from its ranks.

    A group that a program makes for itself has the role of a group with the same ranks, if there is exactly one.
    A group with all ranks is the world, unless a rank recorded more, or the job has only one dimension.
    """
    roles: dict[RecordedGroup, str] = {}
    world = _world(log)
    all_tables = [process.tables for process in log.processes]
    groups = [(tables, number, group) for tables in all_tables for number, group in tables.groups.items()]

    def from_dimension(tables: ProcessTables, number: int, _: RecordedGroup) -> str | None:
        dimensions = tables.dimensions.get(number, ())
        return dimensions[0] if len(dimensions) == 1 else None

    def from_equal_ranks(_: ProcessTables, __: int, group: RecordedGroup) -> str:
        known = {roles[other] for other in by_members[group.members] if other in roles}
        # With several dimensions, a group with all ranks may serve only part of the job, as the ranks that load data.
        is_undecided = len(known) != 1 or (group.members == world and len({*roles.values()} - {"self"}) > 1)
        return ("world" if group.members == world else UNKNOWN) if is_undecided else known.pop()

    by_members: dict[str, set[RecordedGroup]] = {}  # sets: each rank records the same groups
    for _, _, group in groups:
        by_members.setdefault(group.members, set()).add(group)
    sources: tuple[Callable[[ProcessTables, int, RecordedGroup], str | None], ...] = (
        lambda tables, number, group: "self" if len(group.ranks) == 1 else tables.roles.get(number),
        lambda tables, number, group: role_from_description(tables.descriptions.get(number, "")),
        from_dimension,
        from_equal_ranks,
    )
    for source in sources:
        found: dict[RecordedGroup, str] = {}
        for tables, number, group in groups:
            role = source(tables, number, group)
            if role in ROLES:
                found.setdefault(group, role)
        roles = {**found, **roles}
    return roles


def shared_groups(log: Log, roles: Mapping[RecordedGroup, str]) -> dict[RecordedGroup, tuple[str, ...]]:
    """Return the roles of each group that several dimensions use: those of meshes, or of groups with its ranks.

    Args:
        log: A log.
        roles: The result of `roles_of`.
    """
    by_members: dict[str, set[str]] = {}
    for group, role in roles.items():
        if role not in _UNDECIDED:
            by_members.setdefault(group.members, set()).add(role)
    with_equal_ranks = {
        group: tuple(sorted(known))
        for group, role in roles.items()
        if role in _UNDECIDED and len(known := by_members.get(group.members, set())) > 1
    }
    of_meshes = {
        process.tables.groups[number]: known
        for process in log.processes
        for number, dimensions in process.tables.dimensions.items()
        for known in [tuple(role for role in dimensions if role in ROLES)]
        if number in process.tables.groups and len(known) > 1
    }
    return {**with_equal_ranks, **of_meshes}


def _world(log: Log) -> str | None:
    """Return the members of a group of all ranks; None if the number of ranks is not known."""
    return format_rank_list(range(log.world_size)) if log.world_size else None


def message_roles_of(log: Log) -> dict[RecordedGroup, str]:
    """Return the role of point-to-point messages for each group where a rank recorded one."""
    return {
        process.tables.groups[number]: role
        for process in log.processes
        for number, role in process.tables.message_roles.items()
        if number in process.tables.groups and role in ROLES
    }
