"""The tables of one process, as far as they can be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from commtrace.errors import NewerLogError
from commtrace.schema import FORMAT, VERSION

from .log_notes import Note, error_reason

Row: TypeAlias = dict[str, Any]


class Kind(NamedTuple):
    """A row of the kinds table: what a call is."""

    op: str
    variant: str
    api: str
    dtype: str
    reduce_op: str


@dataclass(frozen=True)
class Group:
    """A group, known in the whole run by these three: its ranks in ascending order, its name, and its index."""

    ranks: tuple[int, ...]
    name: str
    index: int


class Site(NamedTuple):
    """A line of code."""

    file: str
    line: int
    function: str


@dataclass
class ProcessTables:
    """The tables of one process; the last row of an id counts."""

    process: Row = field(default_factory=dict)
    kinds: dict[int, Kind] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    roles: dict[int, str] = field(default_factory=dict)
    message_roles: dict[int, str] = field(default_factory=dict)
    """Of the groups whose messages from rank to rank serve another dimension than the group."""
    descriptions: dict[int, str] = field(default_factory=dict)
    """Of groups, by their numbers."""
    sites: dict[int, Site] = field(default_factory=dict)
    jobs: dict[int, Row] = field(default_factory=dict)
    clock: list[Row] = field(default_factory=list)
    stats: Row | None = None
    end: Row | None = None
    salvage: list[Row] = field(default_factory=list)
    notices: list[Row] = field(default_factory=list)
    """Of a dry run: lines of the program that asked for what it cannot give."""
    topology: tuple[tuple[int, ...], ...] = ()
    """Of a dry run: the ranks of every group of the job, whoever is in it."""
    stands_for: tuple[str, int] = "", 1
    """Of a dry run: the ranks that this one was run for, and how many they are."""

    def add(self, row: Row) -> None:
        """Take a row in. Raises KeyError, TypeError or ValueError where it lacks what it needs."""
        name = row.pop("table")
        if name in ("clock", "salvage", "notices"):
            getattr(self, name).append(row)
        elif name in ("process", "stats", "end"):
            setattr(self, name, row)
        elif name == "topology":
            self.topology = tuple(tuple(_natural(rank) for rank in group) for group in row["groups"])
        elif name == "stands_for":
            self.stands_for = str(row["ranks"]), _natural(row["count"])
        elif name == "job":
            self.jobs[_natural(row.get("id", 0))] = row
        elif name in _ROWS:
            key, read = _ROWS[name]
            getattr(self, name)[_natural(row[key])] = read(row)
            if name == "groups":
                self.descriptions[row["id"]] = str(row.get("desc") or "")


def _natural(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 32:
        raise ValueError(value)
    return value


def _group(row: Row) -> Group:
    return Group(
        tuple(sorted(_natural(rank) for rank in row["ranks"])), str(row.get("name") or ""), int(row.get("index") or 0)
    )


# Tables of numbered rows: the key that holds the number, and how a row is read.
_ROWS: Final[dict[str, tuple[str, Callable[[Row], object]]]] = {
    "kinds": ("id", lambda row: Kind(str(row["op"]), *(str(row.get(name) or "") for name in Kind._fields[1:]))),
    "groups": ("id", _group),
    "roles": ("group", lambda row: str(row["role"])),
    "message_roles": ("group", lambda row: str(row["role"])),
    "sites": ("id", lambda row: Site(str(row["file"]), int(row.get("line") or 0), str(row.get("function") or ""))),
}


def read_tables(path: Path) -> tuple[ProcessTables, list[Note]]:
    """Tables of one process. Lines that cannot be read are counted and left out."""
    tables = ProcessTables()
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return tables, [Note("missing", path, "missing", "operations, groups and sites of its records are unknown")]
    except OSError as error:
        return tables, [
            Note("unreadable", path, error_reason(error), "operations, groups and sites of its records are unknown")
        ]
    broken = [number for number, line in enumerate(lines, 1) if line.strip() and not _read_line(tables, line, path)]
    if not broken:
        return tables, []
    if broken == [len(lines)]:
        return tables, [Note("cut", path, "its last line is cut", "that line is left out")]
    what = (
        f"{len(broken)} lines cannot be read, the first is line {broken[0]}"
        if broken[1:]
        else f"line {broken[0]} cannot be read"
    )
    return tables, [
        Note("garbled", path, what, "what they described is unknown" if broken[1:] else "what it described is unknown")
    ]


def _read_line(tables: ProcessTables, line: bytes, path: Path) -> bool:
    try:
        row = json.loads(line)
        if row["table"] == "process":
            _check_process(row, path)
        tables.add(row)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError):
        return False
    return True


def _check_process(row: Row, path: Path) -> None:
    if row["format"] != FORMAT:
        raise ValueError(row["format"])
    if _natural(row["version"]) > VERSION:
        raise NewerLogError(
            f"{path}: its format is version {row['version']}, this commtrace reads up to {VERSION}; upgrade commtrace"
        )


def integer_or_none(value: object) -> int | None:
    """The value if it is a whole number, else None: a garbled table may hold anything."""
    return value if type(value) is int else None
