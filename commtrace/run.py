"""A run, for asking: its events as a pandas DataFrame, and the tables of every analysis.

    run = open_run("logs/run1")
    run.events()                       # normal form, one row per call
    run.table("volume_by_operation")

`Names` turns the numbers in records into words that mean the same on every rank; analyses group by the numbers and
name the small result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import cached_property
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from commtrace.errors import NoSuchTableError
from commtrace.log import Group, Log, Note, Process, Records, Row, Site, Tables, open_log
from commtrace.schema import NORMAL_FORM, RECORD, ROLES, Flag, Phase, State
from commtrace.volume import wire_bytes

Array: TypeAlias = npt.NDArray[Any]

UNKNOWN: Final = "unknown"
"""What a number without a row in the tables is called."""

# Columns of the normal form that are numbers in a record and words outside: the field that holds the number.
WORDS: Final = {
    "op": "kind",
    "variant": "kind",
    "api": "kind",
    "dtype": "kind",
    "group": "group",
    "group_ranks": "group",
    "role": "group",
    "site": "site",
    "phase": "phase",
    "state": "state",
    "flags": "flags",
}
# The other columns, as they are in a record. rank, group_size and wire_bytes are computed.
_NUMBERS: Final = {
    "payload_bytes": "payload",
    **{f"{name}_ns": name for name in ("t_begin", "t_return", "t_wait", "t_start", "t_end")},
    **{name: name for name in ("peer", "tag", "seq", "step", "micro_batch")},
}

_FLAGS: Final = ["|".join(str(flag.name).lower() for flag in Flag if bits & flag.value) for bits in range(256)]


class Names:
    """What the numbers in the records of one process mean. Small, and picklable for worker processes.

    `number` is the position of the process in `Log.processes`.
    """

    def __init__(self, number: int, process: Process, roles: Mapping[Group, str], files: Mapping[str, str]) -> None:
        self.number = number
        self.rank = process.rank
        tables = process.tables
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
            "group_ranks": [compact(group.ranks) for group in groups.values()],
            "role": [roles.get(group, UNKNOWN) for group in groups.values()],
        })  # fmt: skip
        self._add(
            "site", sites, {"site": ["" if site is None else _site_label(site, files) for site in sites.values()]}
        )
        self._add("phase", Phase, {"phase": [phase.name.lower() for phase in Phase]})
        self._add("state", State, {"state": [state.name.lower() for state in State]})
        self._add("flags", range(256), {"flags": _FLAGS})
        self._sizes = np.array([len(groups[number].ranks) for number in sorted(groups)] + [0])
        self._operations, self._operation = np.unique(self._values["op"].astype(str), return_inverse=True)

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

    def words(self, column: str) -> Array:
        """All words of a column; the last is for numbers without a row."""
        return self._values[column]

    def name(self, column: str, numbers: Array) -> Array:
        """The words of a column of WORDS for these numbers."""
        words: Array = self._values[column][self.index(WORDS[column], numbers)]
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

    def wire_bytes(self, records: Records) -> Array:
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


def compact(ranks: Sequence[int]) -> str:
    """Ascending ranks as text: "0-3", "0,2,4", "0-3,8-11"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in spans)


def group_label(group: Group) -> str:
    """One name for a group on all its ranks: ranks, the library's name, and a number where that was used again."""
    return compact(group.ranks) + (f"/{group.name}" if group.name else "") + (f"#{group.index}" if group.index else "")


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
    """What each group of the run serves: what a rank was told of it, else what its members say."""
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
        for group in process.tables.groups.values():
            roles.setdefault(group, "world" if group.ranks == everyone else UNKNOWN)
    return roles


class NormalForm:
    """Turns records into rows of the normal form. Words are categoricals, with the same categories in the whole run."""

    def __init__(self, everyone: Sequence[Names]) -> None:
        words = {
            column: {UNKNOWN, "", *chain.from_iterable(names.words(column) for names in everyone)} for column in WORDS
        }
        self._categories = {column: pd.Index(sorted(words[column])) for column in WORDS}

    def frame(self, records: Records, names: Names) -> pd.DataFrame:
        """One row per record, in the order of the records."""
        sizes = names.group_sizes(records["group"])
        columns: dict[str, Any] = {name: records[field] for name, field in _NUMBERS.items()}
        columns["rank"] = np.full(len(records), names.rank, np.int32)
        columns["group_size"] = pd.Series(sizes, dtype="Int32").mask(sizes == 0)
        columns["wire_bytes"] = names.wire_bytes(records)
        for column, field in WORDS.items():
            codes = self._categories[column].get_indexer(pd.Index(names.words(column).tolist()))
            columns[column] = pd.Categorical.from_codes(
                codes[names.index(field, records[field])], self._categories[column]
            )
        return pd.DataFrame({name: columns[name] for name in NORMAL_FORM})

    def empty(self) -> pd.DataFrame:
        """No rows, and the columns with their types."""
        nobody = Process(Path(), -1, -1, "", Tables(), ())
        return self.frame(np.zeros(0, RECORD), Names(-1, nobody, {}, {}))


class Run:
    """One run of a program: all that its ranks recorded. Nothing but small tables is read before it is asked for."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def __repr__(self) -> str:
        ranks = f"{len(self.ranks)} of {self.world_size or 'unknown'} ranks"
        return f"<Run {self.id}: {ranks}, {len(self.log.processes)} processes, {len(self.notes)} notes>"

    @property
    def id(self) -> str:
        """Identity of the run."""
        return self.log.run

    @property
    def notes(self) -> tuple[Note, ...]:
        """What is damaged or missing in the log, and what follows from it."""
        return self.log.notes

    @property
    def processes(self) -> tuple[Process, ...]:
        """The processes by rank; `tables.process` of each holds its facts (host, versions, launcher, settings ...)."""
        return self.log.processes

    @property
    def ranks(self) -> list[int]:
        """Ranks that left a log, ascending."""
        return sorted({process.rank for process in self.log.processes if process.rank >= 0})

    @property
    def world_size(self) -> int | None:
        """Ranks of the run, None where no process says."""
        return self.log.world_size

    @property
    def job(self) -> Row | None:
        """What is trained, as captured on the lowest rank that did; None where nothing was captured.

        A process may train several models (`process.tables.jobs`); this is its first.
        """
        return next((job for process in self.log.processes for job in process.tables.jobs.values()), None)

    @cached_property
    def names(self) -> tuple[Names, ...]:
        """For each process, what the numbers in its records mean."""
        roles = roles_of(self.log)
        files = short_paths({site.file for process in self.log.processes for site in process.tables.sites.values()})
        return tuple(Names(number, process, roles, files) for number, process in enumerate(self.log.processes))

    def blocks(self) -> Iterator[pd.DataFrame]:
        """The events in normal form, a bounded number at a time, process by process; first a frame without rows."""
        form = NormalForm(self.names)
        yield form.empty()
        for names, process in zip(self.names, self.log.processes, strict=True):
            for segment in process.segments:
                for records in segment.blocks():
                    yield form.frame(records, names)

    def events(self) -> pd.DataFrame:
        """All events in normal form: one row per call, the columns of schema.NORMAL_FORM, by rank and t_begin_ns.

        Sizes are bytes, times ns of the host's monotonic clock with 0 for not known. `wire_bytes` and `group_size` are
        missing where the log does not tell. Needs memory for the whole run; `blocks` does not.
        """
        events = pd.concat(self.blocks(), ignore_index=True)
        for column in WORDS:
            events[column] = events[column].cat.remove_unused_categories()
        return events.sort_values(["rank", "t_begin_ns"], kind="stable", ignore_index=True)

    def tables(self, executor: Executor | None = None) -> dict[str, pd.DataFrame]:
        """The tables of every analysis by name, the same as `commtrace report --json` gives.

        The executor runs over the segments; None: in this process. The result for None is kept.
        """
        if executor is None:
            return self._tables
        return self._analyse(executor)

    def table(self, name: str) -> pd.DataFrame:
        """One table of the report. Raises NoSuchTableError for a name that no analysis has."""
        tables = self.tables()
        if name not in tables:
            raise NoSuchTableError(f"no table is called {name!r}; there are {', '.join(tables)}")
        return tables[name]

    @cached_property
    def _tables(self) -> dict[str, pd.DataFrame]:
        return self._analyse(None)

    def _analyse(self, executor: Executor | None) -> dict[str, pd.DataFrame]:
        # By name: the core knows that there are analyses, and not which.
        analyse: Callable[[Run, Executor | None], dict[str, pd.DataFrame]] = import_module("commtrace.analyses").analyse
        return analyse(self, executor)


def open_run(directory: str | os.PathLike[str]) -> Run:
    """The newest run in a directory: what COMMTRACE named, or a run's folder in it. Raises LogError for no run."""
    return Run(open_log(Path(directory)))
