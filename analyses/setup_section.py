"""Section of the set-up: how the processes were set up, ranks that differ from the others, and process groups."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pandas as pd

from commtrace.formatting import format_plural
from commtrace.rank_ranges import format_ranks, name_ranks, shorten_rank_list
from commtrace.reading.recorded_run import RecordedRun

from .analysed_run import AnalysedRun
from .fold_engine import NamedTables, RunAnalysis
from .grouping import rows_of
from .process_settings import (
    CORES,
    ProcessSettings,
    core_count,
    is_by_rank,
    names_of,
    settings_by_rank,
    without_consequences,
)
from .sections import Block, Report, Section, ShownTable, Tables, first_of
from .table_specs import shared_columns as shared
from .table_specs.spec import TableSpec, count, duration, flag, text_column, word_column

SETUP: Final = TableSpec("setup", "How the processes were set up",
    "A row per setting and value, by kind of setting and name.", (
    word_column("kind", "kind", '"version", "variable", "library", "interface", "processor", "limit" ...'),
    word_column("name", "setting", "Name of the setting.", shortenable=True),
    text_column("value", "value", 'Its value; "-": not set.', shortenable=True),
    shared.ranks_column("ranks", "ranks", "Ranks that have this value."),
    count("processes", "", "Number of these ranks."),
    flag("deviates", "", "Whether a setting that ranks usually have in common has another value on other ranks."),
), {"terminal": "name value ranks", "page": "kind name value ranks"})  # fmt: skip
COMMUNICATORS: Final = TableSpec("communicators", "Process groups and communicators that were used",
    "A row per dimension, backend and size.", (
    shared.ROLE,
    word_column("backend", "backend", "Backend, or the MPI."),
    count("size", "size", "Ranks of each group."),
    count("groups", "groups", "Number of different groups."),
    shared.ranks_column("ranks", "ranks", "Recorded ranks that are members."),
    duration("create_ns", "creation", "Time that a rank took to create one, median; missing if not known: groups that "
        "the program did not create, and logs of earlier releases. NCCL may connect in the first call instead."),
    duration("create_max_ns", "longest", "The longest of these times."),
    shared.RANK,
), {"terminal": "role backend size groups ranks create_ns create_max_ns"})  # fmt: skip

_PATH: Final = re.compile(r"\(/[^()]*/([^/()]+)\)")
_MIN_ROWS: Final = 100
"""Rows that are shown of settings."""
_MAX_NAMED: Final = 6
"""Number of settings that a finding names."""


def _finish(run: AnalysedRun) -> NamedTables:
    return {"setup": _setup_table(settings_by_rank(run), _local_ranks(run)), "communicators": _communicators(run)}


def _local_ranks(run: RecordedRun) -> dict[int, tuple[str, int]]:
    """Return host and local rank by rank; the local rank is counted if the launcher has not set it."""
    counted: Counter[str] = Counter()
    places = {}
    for process in run.processes:
        local = process.tables.process.get("local_rank")
        places[process.rank] = process.host, local if type(local) is int else counted[process.host]
        counted[process.host] += 1
    return places


def _setup_table(ranks: Mapping[int, ProcessSettings], places: Mapping[int, tuple[str, int]]) -> pd.DataFrame:
    rows: list[tuple[object, ...]] = []
    all_settings = {id(settings): settings for settings in ranks.values()}
    differing = {name for name in names_of(all_settings.values()) if _differs(name, ranks, places)}
    deviating = {*without_consequences(differing)}
    for name in names_of(all_settings.values()):
        by_value: dict[str, list[int]] = defaultdict(list)
        for rank, settings in ranks.items():
            if name in settings.values or settings.complete:
                by_value[settings.shown(name)].append(rank)
        kind = next(settings.values[name].kind for settings in all_settings.values() if name in settings.values)
        for value, members in by_value.items():
            rows.append((kind, name, value, format_ranks(members), len(members), name in deviating))
    return pd.DataFrame(rows, columns=SETUP.column_names)


def _differs(name: str, ranks: Mapping[int, ProcessSettings], places: Mapping[int, tuple[str, int]]) -> bool:
    """Return whether a setting that ranks usually have in common differs between them.

    It does not if each of several ranks has a value of its own, or each local rank of several hosts: launch scripts
    give each rank its own device, interface or cores. Of the cores, the number is compared.
    """
    if is_by_rank(name):
        return False
    values = {rank: settings.compared(name) for rank, settings in ranks.items()}
    if name == CORES:
        values = {rank: value and str(core_count(value)) for rank, value in values.items()}
    known = {rank: value for rank, value in values.items() if value is not None}
    distinct = len({*known.values()})
    if distinct < 2 or (distinct == len(known) > 2):
        return False
    by_local_rank = {(places[rank][1], value) for rank, value in known.items()}
    local_ranks = {places[rank][1] for rank in known}
    is_by_local_rank = len(by_local_rank) == len(local_ranks) and len({places[rank][0] for rank in known}) > 1
    return not is_by_local_rank


def _communicators(run: AnalysedRun) -> pd.DataFrame:
    members: dict[tuple[Any, ...], tuple[set[Any], set[int], list[tuple[int, int]]]] = {}
    for process in run.processes:
        tables = process.tables
        for number, group in tables.groups.items():
            key = tables.roles.get(number, "unknown"), tables.backends.get(number, ""), len(group.ranks)
            groups, ranks, times = members.setdefault(key, (set(), set(), []))
            groups.add(group)
            ranks.add(process.rank)
            if number in tables.creation_ns:
                times.append((tables.creation_ns[number], process.rank))
    rows = []
    for key, (groups, ranks, times) in sorted(members.items()):
        times.sort()
        median, longest = (times[(len(times) - 1) // 2], times[-1]) if times else ((None,), (None, None))
        rows.append((*key, len(groups), format_ranks(ranks), median[0], *longest))
    types = {"create_ns": "Int64", "create_max_ns": "Int64", "rank": "Int64"}
    return pd.DataFrame(rows, columns=COMMUNICATORS.column_names).astype(types)


def _show(report: Report) -> Iterator[Block]:
    """Yield the tables; of the paths of libraries, the names of the files."""
    for spec in (SETUP, COMMUNICATORS):
        if len(rows := report.rows(spec)):
            shown = rows.head(max(report.max_rows, _MIN_ROWS))
            if spec is SETUP:
                shown = shown.assign(value=shown["value"].str.replace(_PATH, r"(.../\1)", regex=True))
            yield ShownTable(spec, shown, spec.title + first_of(len(shown), len(rows)))


def _findings(tables: Tables) -> Iterator[str]:
    table = tables["setup"]
    deviating = table.loc[table["deviates"]]
    unusual: dict[str, list[str]] = defaultdict(list)
    for name, values in deviating.groupby("name", sort=False):
        rows = sorted(rows_of(values), key=lambda row: -row.processes)
        if 2 * rows[0].processes > sum(row.processes for row in rows):
            for row in rows[1:]:
                unusual[row.ranks].append(f"{name}: {row.value}, the others: {rows[0].value}")
        else:
            texts = [f"{row.value} on {name_ranks(row.ranks)}" for row in rows[:_MAX_NAMED]]
            more = [f"{len(rows) - _MAX_NAMED:,} other values"] if len(rows) > _MAX_NAMED else []
            yield f"Ranks are set up differently: {name}: {'; '.join([*texts, *more])}."
    for ranks, texts in unusual.items():
        more = [format_plural(len(texts) - _MAX_NAMED, "other setting")] if len(texts) > _MAX_NAMED else []
        verb = "is" if ranks.isdecimal() else "are"
        named = name_ranks(shorten_rank_list(ranks), "Rank")
        yield f"{named} {verb} set up differently from the others. {'; '.join([*texts[:_MAX_NAMED], *more])}."


ANALYSIS: Final = RunAnalysis("setup", _finish)
SECTION: Final = Section(
    "setup",
    "How the processes were set up",
    (SETUP, COMMUNICATORS),
    (ANALYSIS,),
    blocks=_show,
    default=False,
    look_for="Ranks that differ from the others, and libraries other than those that you meant to load. "
    "`commtrace diff` names the settings that two runs do not share.",
    absent="The log has no settings: it is a dry run, or of an earlier release.",
    findings=_findings,
)
"""The section."""
