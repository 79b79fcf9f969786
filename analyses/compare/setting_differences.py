"""Settings of runs that may be the cause of different calls or times: job, versions, and how processes were set up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any, Final

import pandas as pd

from commtrace.analyses.process_settings import ProcessSettings, names_of, without_consequences
from commtrace.analyses.table_specs import shared_columns as shared
from commtrace.analyses.table_specs.spec import TableSpec, text_column, word_column
from commtrace.formatting import format_plural
from commtrace.job_facts import known
from commtrace.job_row import JobRow
from commtrace.rank_ranges import format_ranks
from commtrace.reading.recorded_run import RecordedRun

from .run_calls import RunCalls

SETTING_DIFFERENCES: Final = TableSpec("setting_differences",
    "Settings that differ between two runs", "A row per setting and pair of values.", (
    text_column("name", "setting",
        "World size, field of the job, version, variable, loaded library, network interface, cores ..."),
    text_column("a", "A", 'Value in the first run; "-" if it has none.'),
    text_column("b", "B", "The same in the second run."),
    shared.ranks_column("ranks", "ranks",
        'Ranks on which these values differ; "": all that both runs have, or a setting of the whole job.'),
    word_column("explains", "can explain", '"calls": it can change which calls are made, and their times; "times".'),
))  # fmt: skip

_CHANGES_CALLS: Final = ("world size", "version ", "job ", "DS_", "TORCH_DISTRIBUTED_")
_LONGEST: Final = 60
_MAX_PAIRS: Final = 4


def setting_facts(run: RecordedRun) -> dict[str, str]:
    """Return the world size, the versions and the job of a run by name, as its lowest rank recorded them."""
    process: Mapping[str, Any] = run.processes[0].tables.process if run.processes else {}
    job = JobRow.read(run.job or {})
    facts = {"world size": str(run.world_size or "")} | dict(_flatten(process.get("versions") or {}, "version "))
    facts |= dict(_flatten(job.to_json(), "job "))
    if elements := known(lambda: job.elements):
        del facts["job parameters"]  # to be the last
        facts["job parameters"] = f"{format_plural(len(job.parameters), 'tensor')} of {elements:,} elements"
    return {name: value for name, value in facts.items() if value}


def compare_settings(a: RunCalls, b: RunCalls) -> pd.DataFrame:
    """Return the settings that differ, those that can explain different calls first: SETTING_DIFFERENCES.

    Settings that follow from another one that differs are left out, as are those that only one of the logs can have.
    """
    by_rank = {rank: (a.settings[rank], b.settings[rank]) for rank in sorted({*a.settings} & {*b.settings})}
    names = [name for name in {**a.facts, **b.facts} if not (by_rank and name.startswith("version "))]
    rows = [(name, a.facts.get(name, "-"), b.facts.get(name, "-"), "") for name in names]
    rows = [row for row in rows if row[1] != row[2]] + [*_differences_by_rank(by_rank)]
    table = pd.DataFrame(rows, columns=SETTING_DIFFERENCES.column_names[:-1], dtype=object)
    explains = ["calls" if name.startswith(_CHANGES_CALLS) else "times" for name in table["name"]]
    return table.assign(explains=explains).sort_values("explains", kind="stable", ignore_index=True)


def _differences_by_rank(
    by_rank: Mapping[int, tuple[ProcessSettings, ProcessSettings]],
) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, values and ranks of the settings of processes that differ."""
    pairs = {(id(a), id(b)): (a, b) for a, b in by_rank.values()}
    names = names_of(settings for pair in pairs.values() for settings in pair)
    differing = {key: [name for name in names if _differ(name, *pair)] for key, pair in pairs.items()}
    ranks: dict[str, dict[tuple[str, str], list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, (a, b) in by_rank.items():
        for name in differing[id(a), id(b)]:
            ranks[name][a.shown(name), b.shown(name)].append(rank)
    for name in without_consequences(name for name in names if name in ranks):
        values = [*ranks[name].items()]
        for (value_a, value_b), members in values[:_MAX_PAIRS]:
            yield name, value_a, value_b, format_ranks(members) if len(members) < len(by_rank) else ""
        if rest := [rank for _, members in values[_MAX_PAIRS:] for rank in members]:
            yield name, "further values", "further values", format_ranks(rest)


def _differ(name: str, a: ProcessSettings, b: ProcessSettings) -> bool:
    values = a.compared(name), b.compared(name)
    return None not in values and values[0] != values[1]


def _flatten(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(item, f"{name}{key}" if name.endswith(" ") else f"{name}.{key}")
        return
    text = str(value)
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 12]}... #{blake2b(text.encode(), digest_size=3).hexdigest()}"
    yield name, text
