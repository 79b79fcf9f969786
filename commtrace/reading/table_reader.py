"""Table reader: the JSON lines of one process, as far as they can be read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from commtrace.errors import NewerLogError
from commtrace.rank_ranges import MAX_RANKS, format_rank_list, format_ranks, parse_rank_list, parse_ranks
from commtrace.schema import FORMAT, VERSION
from commtrace.statements import Statement

from .log_notes import Note, error_reason

Row: TypeAlias = dict[str, Any]


class Kind(NamedTuple):
    """A row of the kinds table: operation and type of calls."""

    op: str
    variant: str
    api: str
    dtype: str
    reduce_op: str
    sizes: str = ""
    """What is not known of the sizes in the records, which are then 0: "" nothing, "own share", or "payload"."""


@dataclass(frozen=True)
class RecordedGroup:
    """A process group, identified within the run by its members, name and index."""

    members: str
    """Its ranks, ascending, as text (`format_rank_list`). Many rows have equal ranks, so parsed ranks are cached."""
    name: str
    index: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its ranks, ascending."""
        return _ranks(self.members)

    @property
    def ranks_label(self) -> str:
        """Its ranks, as `format_ranks` writes them."""
        return _ranks_label(self.members)


class CallPurpose(NamedTuple):
    """Why calls were made: the name of a `schema.Purpose`, and facts such as the module."""

    name: str
    facts: tuple[tuple[str, str | int], ...] = ()


class ThreadStack(NamedTuple):
    """A thread in a sample of stacks, as docs/reference/log-format.md describes it."""

    name: str
    is_main: bool
    state: str
    system_call: str
    cpu_ns: int | None
    storage_bytes: int | None
    frames: tuple[tuple[str, int, str], ...]
    """File, line and function, the innermost first."""


class StackSample(NamedTuple):
    """What the threads of a process did while it made no progress."""

    mono_ns: int
    calls: int
    """Number of calls that the process had begun."""
    pause_ns: int
    in_call: bool
    window_ns: int
    """Time over which processor times of threads were measured."""
    children_cpu_ns: int
    """Time of its child processes on a processor, or ready for one, within this time; 0: none, or not known."""
    children_use_storage: bool
    """Whether a child process waited for storage, read from it, or changed files on it, within this time."""
    threads: tuple[ThreadStack, ...]


class Site(NamedTuple):
    """A call site, with its caller if it is in a helper that many lines call, and the purpose of its calls."""

    file: str
    line: int
    function: str
    caller: Site | None = None
    purpose: CallPurpose | None = None
    """None: not recorded."""

    def lines(self) -> Iterator[Site]:
        """Yield the line, then its caller if there is one."""
        yield self
        if self.caller is not None:
            yield self.caller

    def label(self, short: Mapping[str, str]) -> str:
        """Return "file:line function", then " < " and the caller's. `short` maps files to their displayed names.

        Imported sites may have no file: "function".
        """
        lines = (
            (f"{short.get(line.file, line.file)}:{line.line} " if line.file else "", line) for line in self.lines()
        )
        return " < ".join(f"{place}{line.function}".rstrip() for place, line in lines)


@dataclass
class ProcessTables:
    """The tables of one process. A later row replaces an earlier one of the same id."""

    process: Row = field(default_factory=dict)
    kinds: dict[int, Kind] = field(default_factory=dict)
    groups: dict[int, RecordedGroup] = field(default_factory=dict)
    roles: dict[int, str] = field(default_factory=dict)
    message_roles: dict[int, str] = field(default_factory=dict)
    dimensions: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Roles of the mesh dimensions that use a group."""
    """Role of point-to-point messages by group, where it differs from the group's."""
    descriptions: dict[int, str] = field(default_factory=dict)
    """Descriptions by group."""
    sites: dict[int, Site] = field(default_factory=dict)
    jobs: dict[int, Row] = field(default_factory=dict)
    stages: dict[int, Row] = field(default_factory=dict)
    """Stages of torch.distributed.pipelining on this rank, by number: rows of `ScheduledStageRow`."""
    experts: dict[int, Row] = field(default_factory=dict)
    """Layers with experts, and what their passes do, by id: rows of `ExpertLayerRow`."""
    routing: list[Row] = field(default_factory=list)
    """Steps whose tokens for experts differ from those of the step before: rows of `RoutingRow`."""
    clock: list[Row] = field(default_factory=list)
    backends: dict[int, str] = field(default_factory=dict)
    """Backends by group."""
    creation_ns: dict[int, int] = field(default_factory=dict)
    """Time that the library took to create a group, by group, where it is known."""
    setup: Row | None = None
    """How the process was set up; None in logs of earlier releases, and of processes that were killed at once."""
    stats: Row | None = None
    end: Row | None = None
    leaving: Row | None = None
    """How it left its program, before the exit handlers."""
    exit_status: int | None = None
    """The status that it passed to `exit`, after the exit handlers."""
    thread_exceptions: list[Row] = field(default_factory=list)
    peer_ends: list[Row] = field(default_factory=list)
    """Ends of other processes on its host that it outlived."""
    salvage: list[Row] = field(default_factory=list)
    stacks: StackSample | None = None
    """The last sample of its stacks."""
    notices: list[Row] = field(default_factory=list)
    """Dry run: lines of the program that read values that were not computed."""
    writes: list[Row] = field(default_factory=list)
    """Dry run: files that the rank would have changed."""
    topology: tuple[tuple[int, ...], ...] = ()
    """Dry run: the ranks of every group of the job."""
    stands_for: tuple[str, int] = "", 1
    """Dry run: the ranks that this rank represents, as text, and their number."""
    flops: Mapping[int, tuple[int, int]] | None = None
    """Dry run: floating-point operations directly before a call, all and those outside of backward, by the number of
    the call from 1; None: not known."""

    @property
    def source(self) -> Row:
        """What the process was imported from: `format`, `tool`, `files` ...; empty if commtrace recorded it."""
        source = self.process.get("source")
        return source if isinstance(source, dict) else {}

    def add(self, row: Row) -> None:
        """Add a row that `_parse` returned. Raise KeyError, TypeError or ValueError if it cannot be used."""
        row_type = _ROW_TYPES.get(row.pop("table"))
        if row_type is None:
            return
        for key, limit in row_type.limits.items():
            if row.get(key) is not None and _natural(row[key]) >= limit:
                raise ValueError(row[key])
        row_type.keep(self, row)


class _RowType(NamedTuple):
    """What is done with the rows of one table.

    Attributes:
        keep: Keeps a row. Raises KeyError, TypeError or ValueError if it cannot be used.
        limits: Numbers of these fields are damage from these limits on. Sums of smaller ones over all processes fit in
            64 bits.
        value: Converts a row; the result is cached for equal lines, and is `row["value"]` for `keep`.
    """

    keep: Callable[[ProcessTables, Row], None]
    limits: Mapping[str, int] = {}
    value: Callable[[Row], object] | None = None


_MAX_ID: Final = 1 << 32
_MAX_COUNTER: Final = 1 << 53
_MAX_TIME: Final = 1 << 62
_MAX_FLOPS: Final = 1 << 100
_CLOCKS: Final = {"mono_ns": _MAX_TIME, "unix_ns": _MAX_TIME}


def _natural(value: object, below: int = 1 << 62) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(value)
    return value


def _id(value: object) -> int:
    return _natural(value, _MAX_ID)


def _rank_list(value: Any) -> list[int]:
    """Return the ranks of a group, in its order, from text or, in version 1 of the format, from a list."""
    return parse_rank_list(value) if isinstance(value, str) else [_natural(rank, MAX_RANKS) for rank in value]


@lru_cache(256)
def _ranks(members: str) -> tuple[int, ...]:
    return tuple(parse_rank_list(members))


@lru_cache(1024)
def _ranks_label(members: str) -> str:
    return format_ranks(_ranks(members))


def _group(row: Row) -> RecordedGroup:
    members = format_rank_list(sorted(_rank_list(row["ranks"])))
    return RecordedGroup(members, str(row.get("name") or ""), int(row.get("index") or 0))


def _site(row: Row) -> Site:
    caller = _site(row["caller"]) if "caller" in row else None
    purpose = _purpose(row["purpose"]) if "purpose" in row else None
    return Site(str(row["file"]), int(row.get("line") or 0), str(row.get("function") or ""), caller, purpose)


def _purpose(row: Row) -> CallPurpose:
    facts = tuple((str(name), value if type(value) is int else str(value)) for name, value in row.items())
    return CallPurpose(str(row["name"]), tuple(fact for fact in facts if fact[0] != "name"))


def _kind(row: Row) -> Kind:
    return Kind(str(row["op"]), *(str(row.get(name) or "") for name in Kind._fields[1:]))


def _stacks(row: Row) -> StackSample:
    threads = (
        ThreadStack(
            str(thread["name"]), thread["main"] is True, str(thread["state"]), str(thread["system_call"]),
            None if thread["cpu_ns"] is None else _natural(thread["cpu_ns"]),
            None if thread.get("storage_bytes") is None else _natural(thread["storage_bytes"]),
            tuple((str(file), int(line), str(function)) for file, line, function in thread["frames"]),
        )
        for thread in row["threads"]
    )  # fmt: skip
    return StackSample(
        _natural(row["mono_ns"]), _natural(row["calls"]), _natural(row["pause_ns"]), row["in_call"] is True,
        _natural(row["window_ns"]), _natural(row.get("children_cpu_ns", 0)),
        row.get("children_use_storage") is True, tuple(threads),
    )  # fmt: skip


def _role(row: Row) -> str:
    return str(row["role"])


def _keep_last(name: str, tables: ProcessTables, row: Row) -> None:
    setattr(tables, name, row)


def _keep_all(name: str, tables: ProcessTables, row: Row) -> None:
    getattr(tables, name).append(row)


def _keep_by(key: str, name: str, tables: ProcessTables, row: Row) -> None:
    getattr(tables, name)[_id(row[key])] = row["value"]


def _keep_stacks(tables: ProcessTables, row: Row) -> None:
    tables.stacks = row["value"]


def _keep_dimension(tables: ProcessTables, row: Row) -> None:
    group, role = _id(row["group"]), str(row["role"])
    known = tables.dimensions.get(group, ())
    if role not in known:
        tables.dimensions[group] = *known, role


def _keep_group(tables: ProcessTables, row: Row) -> None:
    _keep_by("id", "groups", tables, row)
    tables.descriptions[row["id"]] = str(row.get("desc") or "")
    tables.backends[row["id"]] = str(row.get("backend") or "")
    if row.get("create_ns") is not None:
        tables.creation_ns[row["id"]] = row["create_ns"]


def _keep_job(tables: ProcessTables, row: Row) -> None:
    tables.jobs[_id(row.get("id", 0))] = row


def _keep_passes(tables: ProcessTables, row: Row) -> None:
    job = tables.jobs[_id(row["job"])]
    job["passes"] = [*job.get("passes", ()), row]  # a new list: equal lines may share their row


def _keep_stage(tables: ProcessTables, row: Row) -> None:
    tables.stages[_natural(row["stage"])] = row


def _keep_experts(tables: ProcessTables, row: Row) -> None:
    tables.experts[_id(row["id"])] = row


def _keep_topology(tables: ProcessTables, row: Row) -> None:
    tables.topology = tuple(tuple(_rank_list(group)) for group in row["groups"])


def _keep_stands_for(tables: ProcessTables, row: Row) -> None:
    tables.stands_for = str(row["ranks"]), _natural(row["count"])
    if len(parse_ranks(tables.stands_for[0])) != tables.stands_for[1]:
        raise ValueError(row["count"])


def _keep_flops(tables: ProcessTables, row: Row) -> None:
    counts = [[_natural(count, _MAX_FLOPS) for count in row[name]] for name in ("flops", "forward")]
    tables.flops = dict(zip(map(_natural, row["calls"]), zip(*counts, strict=True), strict=True))


def _time(row: Row) -> int | None:
    """Return the time of a row; None: it is of a dry run, whose log has no times."""
    return _natural(row["mono_ns"]) if "mono_ns" in row else None


def _keep_leaving(tables: ProcessTables, row: Row) -> None:
    tables.leaving = {**row, "mono_ns": _time(row), "exception": _exception(row)}


def _keep_thread_exception(tables: ProcessTables, row: Row) -> None:
    tables.thread_exceptions.append({**row, "mono_ns": _time(row), "exception": _exception(row)})


def _keep_peer_end(tables: ProcessTables, row: Row) -> None:
    tables.peer_ends.append({**row, **{name: _natural(row[name]) for name in ("rank", "pid", "mono_ns")}})


def _exception(row: Row) -> Row | None:
    """Return the facts about an exception in a row, with a Site for each line; None if there is none."""
    facts = row.get("exception")
    if facts is None:
        return None
    worker = facts.get("worker")
    return {
        "type": str(facts["type"]),
        "message": str(facts.get("message") or ""),
        "signal": None if facts.get("signal") is None else _natural(facts["signal"], 128),
        "lines": tuple(map(_site, facts["lines"])),
        "at": _natural(facts.get("at", 0)),
        "worker": None if worker is None else (str(worker["type"]), _site(worker) if "file" in worker else None),
    }


_PROCESS_LIMITS: Final = {"rank": MAX_RANKS, "world_size": MAX_RANKS, "pid": _MAX_ID, **_CLOCKS}
_STATS_LIMITS: Final = {
    **dict.fromkeys(("calls", "dropped", "removed", "lost", "hook_errors", "write_errors"), _MAX_COUNTER),
    **dict.fromkeys(("cost_samples", "cost_ns", "cost_p99_ns", "first_calls", "first_ns"), _MAX_COUNTER),
    **dict.fromkeys(("steady_samples", "steady_ns", "drain_cpu_ns", "untimed"), _MAX_COUNTER),
    "mono_ns": _MAX_TIME,
}
_STACKS_LIMITS: Final = {"mono_ns": _MAX_TIME, "calls": _MAX_COUNTER, "pause_ns": _MAX_TIME, "window_ns": _MAX_TIME}
_ROW_TYPES: Final[Mapping[str, _RowType]] = {
    "process": _RowType(partial(_keep_last, "process"), _PROCESS_LIMITS),
    "setup": _RowType(partial(_keep_last, "setup")),
    "stats": _RowType(partial(_keep_last, "stats"), _STATS_LIMITS),
    "end": _RowType(partial(_keep_last, "end"), _CLOCKS),
    "leaving": _RowType(_keep_leaving, {**_CLOCKS, "status": 256}),
    "thread_exceptions": _RowType(_keep_thread_exception, _CLOCKS),
    "peer_ends": _RowType(_keep_peer_end, {"rank": MAX_RANKS, "pid": _MAX_ID, "status": 1 << 16, **_CLOCKS}),
    "clock": _RowType(partial(_keep_all, "clock"), _CLOCKS),
    "salvage": _RowType(partial(_keep_all, "salvage")),
    "stacks": _RowType(_keep_stacks, _STACKS_LIMITS, value=_stacks),
    "notices": _RowType(partial(_keep_all, "notices")),
    "writes": _RowType(partial(_keep_all, "writes")),
    "kinds": _RowType(partial(_keep_by, "id", "kinds"), value=_kind),
    "groups": _RowType(_keep_group, {"create_ns": _MAX_COUNTER}, value=_group),
    "roles": _RowType(partial(_keep_by, "group", "roles"), value=_role),
    "message_roles": _RowType(partial(_keep_by, "group", "message_roles"), value=_role),
    "dimensions": _RowType(_keep_dimension),
    "sites": _RowType(partial(_keep_by, "id", "sites"), value=_site),
    "job": _RowType(_keep_job),
    "passes": _RowType(_keep_passes),
    "stages": _RowType(_keep_stage),
    "experts": _RowType(_keep_experts),
    "routing": _RowType(partial(_keep_all, "routing")),
    "topology": _RowType(_keep_topology),
    "stands_for": _RowType(_keep_stands_for),
    "flops": _RowType(_keep_flops),
}
"""The tables of a process's log by name. Rows of other tables are of a newer commtrace, and left out."""

_ALL_UNKNOWN: Final = "operations, groups and sites of its records are unknown"


def read_tables(path: Path, in_memory: bytes = b"") -> tuple[ProcessTables, list[Note]]:
    """Read the tables of one process. Lines that cannot be read are left out and counted in a note.

    Args:
        path: The file.
        in_memory: Its lines in shared memory, which may be ahead of the file. No record refers to a last line that is
            cut there or, as the process was killed or is still writing, in the file.

    Raises:
        NewerLogError: The tables have a newer log format.
    """
    try:
        content = path.read_bytes()
        if in_memory:
            content = max(content, in_memory, key=len)
            content = content[: content.rfind(b"\n") + 1]
        return parse_tables(path, content)
    except FileNotFoundError:
        if in_memory:  # the process was killed before it wrote the file
            return parse_tables(path, in_memory[: in_memory.rfind(b"\n") + 1])
        return ProcessTables(), [Note("missing", path, "missing", _ALL_UNKNOWN)]
    except OSError as error:
        return ProcessTables(), [Note("unreadable", path, error_reason(error), _ALL_UNKNOWN)]


def parse_tables(path: Path, text: bytes) -> tuple[ProcessTables, list[Note]]:
    """Read the tables of one process from the content of their file; see `read_tables`."""
    tables = ProcessTables()
    text, tables.exit_status = _split_exit_status(text)
    lines = text.split(b"\n")
    broken = [number for number, line in enumerate(lines, 1) if line.strip() and not _read_line(tables, line, path)]
    if not broken:
        return tables, []
    if broken == [len(lines)]:
        return tables, [Note("cut", path, "its last line is cut", "that line is left out")]
    if len(broken) == 1:
        what = Statement("line {} cannot be read", broken[0])
        return tables, [Note("garbled", path, what, "what it described is unknown")]
    what = Statement("{} lines cannot be read, the first is line {}", len(broken), broken[0])
    return tables, [Note("garbled", path, what, "what they described is unknown")]


def _split_exit_status(text: bytes) -> tuple[bytes, int | None]:
    """Split the tables of a process from the byte after their last line, which is its exit status; None without one."""
    if text[-2:-1] == b"\n" and text[text.rfind(b"\n", 0, -2) + 1 :].startswith(b'{"table": "end"'):
        return text[:-1], text[-1]
    return text, None


def _read_line(tables: ProcessTables, line: bytes, path: Path) -> bool:
    try:
        row = {**_parse(line)}
        if row["table"] == "process":
            if row["format"] != FORMAT:
                raise ValueError(row["format"])
            if _natural(row["version"]) > VERSION:
                raise NewerLogError(
                    f"{path}: its format is version {row['version']}, but this commtrace reads versions up to "
                    f"{VERSION}; upgrade commtrace"
                )
        tables.add(row)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError):
        return False
    return True


@lru_cache(1024)
def _parse(line: bytes) -> Row:
    """Return the row of a line, with its converted value as `value`. Cached, as ranks have many equal lines."""
    row: Row = json.loads(line, parse_float=_finite, parse_constant=_finite)
    if b"\\ud" in line.lower():
        json.dumps(row, ensure_ascii=False).encode()  # half of a surrogate pair cannot be printed
    row_type = _ROW_TYPES.get(row["table"])
    if row_type is not None and row_type.value is not None:
        row["value"] = row_type.value(row)
    return row


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


def integer_or_none(value: object) -> int | None:
    """Return the value if it is an integer, else None: a garbled table may hold anything."""
    return value if type(value) is int else None
