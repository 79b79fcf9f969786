"""Coverage of the log: its processes, call states, blind spots and problems. See `table_specs` for the columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import pandas as pd

from commtrace.formatting import format_missing, format_ranks
from commtrace.reading.log_notes import Note
from commtrace.reading.process_reader import Process
from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.table_reader import integer_or_none
from commtrace.schema import WITHOUT_RECORD

from .fold_engine import Analysis, NamedTables
from .grouping import merge_sums
from .record_blocks import RecordBlock, table_by
from .table_specs import TABLES

FILE_PROBLEMS: Final = ("cut", "foreign", "unreadable", "missing", "garbled")
"""Kinds of notes on files of the log."""

COUNTERS: Final = ("calls", *WITHOUT_RECORD, "hook_errors")
NOT_SELECTED: Final = "not_selected"


def _partial(block: RecordBlock) -> pd.DataFrame:
    return table_by(block.distinct_calls_by_step, ("process", "state"), {})


def _finish(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    processes = _processes(table, run)
    return {
        "coverage": pd.DataFrame([_coverage(processes, run)]),
        "states": _states(table),
        "processes": processes,
        "blind_spots": _blind_spots(run),
        "notes": notes_table(run.notes),
    }


def notes_table(notes: Iterable[Note]) -> pd.DataFrame:
    """Return the table `notes`."""
    rows = [(note.kind, str(note.path), note.what, note.consequence) for note in notes]
    return pd.DataFrame(rows, columns=TABLES["notes"].column_names)


def _states(table: pd.DataFrame) -> pd.DataFrame:
    states = table.groupby(["state"], as_index=False)[["calls"]].sum()
    states["share"] = states["calls"] / states["calls"].sum()
    return states.sort_values("calls", ascending=False, kind="stable", ignore_index=True)


def _processes(table: pd.DataFrame, run: RecordedRun) -> pd.DataFrame:
    records = table.groupby("process")["calls"].sum().to_dict()
    rows = [_process(process, int(records.get(number, 0))) for number, process in enumerate(run.processes)]
    return pd.DataFrame(rows, columns=TABLES["processes"].column_names).astype(
        dict.fromkeys((*COUNTERS, "not_found", "started_unix_ns"), "Int64")
    )


def _process(process: Process, records: int) -> dict[str, object]:
    facts, stats, end = process.tables.process, process.tables.stats or {}, process.tables.end
    counters = {name: integer_or_none(stats.get(name)) for name in COUNTERS}
    error = stats.get("first_error")
    return {
        "rank": process.rank,
        "host": process.host,
        "pid": process.pid,
        "recorder": str(facts["recorder"]) if "recorder" in facts else None,
        "simulated": bool(facts.get("simulated")),
        "started_unix_ns": integer_or_none(facts.get("unix_ns")),
        "records": records,
        **counters,
        NOT_SELECTED: process.not_selected,
        "first_error": str(error) if error else None,
        "end": str(end.get("reason")) if end is not None else None,
        "not_found": _not_found(counters, records + process.not_selected) if end is not None else None,
    }


def _not_found(counters: dict[str, int | None], records: int) -> int | None:
    """Return how many selected calls were counted but have no record and are in no other (final) counter."""
    calls, *without_record = (counters[name] for name in ("calls", *WITHOUT_RECORD[:3]))
    if calls is None or None in without_record:
        return None
    without_record.append(counters["unrecorded"])  # not in the oldest logs
    return max(0, calls - sum(count or 0 for count in without_record) - records)


def _coverage(processes: pd.DataFrame, run: RecordedRun) -> dict[str, object]:
    files = Counter(note.kind for note in run.notes)
    errors = processes["first_error"].dropna()
    not_selected = run.ranks_not_selected
    return {
        "run": run.id,
        "ranks_seen": len(run.ranks),
        "world_size": run.world_size,
        "ranks_missing": format_missing({*run.ranks, *not_selected}, run.world_size) if run.world_size else None,
        "ranks_not_selected": format_ranks(not_selected),
        "steps_selected": run.selected_steps,
        "hosts": processes["host"].nunique(),
        "processes": len(processes),
        "without_end": int(processes["end"].isna().sum()),
        "records": int(processes["records"].sum()),
        # A sum is not known if any of its terms is not.
        **{
            name: None if processes[name].isna().any() else int(processes[name].sum())
            for name in (*COUNTERS, NOT_SELECTED, "not_found")
        },
        "simulated": int(processes["simulated"].sum()),
        "first_error": errors.iloc[0] if len(errors) else None,
        **{f"files_{kind}": files[kind] for kind in FILE_PROBLEMS},
    }


def _blind_spots(run: RecordedRun) -> pd.DataFrame:
    processes: Counter[str] = Counter()
    for process in run.processes:
        blind_spots = process.tables.process.get("blind_spots")
        processes.update(map(str, blind_spots if isinstance(blind_spots, list) else ()))
    return pd.DataFrame(processes.most_common(), columns=["blind_spot", "processes"])


ANALYSIS: Final = Analysis("coverage", _partial, merge_sums("process", "state"), _finish, reads_cells=True)
