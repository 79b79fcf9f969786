"""Coverage of the log: its processes, call states, blind spots and problems.

Each hook says in its `hook.py` what it does not observe; this module only counts it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import pandas as pd

from commtrace.formatting import format_count
from commtrace.rank_ranges import format_missing, format_ranks
from commtrace.reading.log_notes import Note
from commtrace.reading.process_reader import Process
from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.table_reader import integer_or_none
from commtrace.schema import WITHOUT_RECORD

from .fold_engine import Analysis, NamedTables
from .grouping import merge_sums
from .record_blocks import RecordBlock, table_by
from .table_specs import shared_columns as shared
from .table_specs.spec import TableSpec, column, count, flag, share, text_column, word_column

_COUNTERS: Final = (
    count("calls", "calls", "Calls that the hooks counted; missing unless every process wrote its counters."),
    count("dropped", "", "Calls without a record because the ring buffer was full."),
    count("removed", "", "Records removed to keep the log below its size limit."),
    count("lost", "", "Records that could not be written."),
    count("unrecorded", "", "Calls without a record because a hook failed."),
    count("hook_errors", "", "Failures of hooks."),
    count("not_selected", "", "Calls without a record because COMMTRACE_STEPS left out their steps."),
)  # fmt: skip
_NOT_FOUND: Final = count("not_found", "",
    "Further records that processes counted as written but the log lacks.")  # fmt: skip
_FIRST_ERROR: Final = text_column("first_error", "", "Message of the first hook error; missing if there was none.")

COVERAGE: Final = TableSpec("coverage", "Log coverage", "One row.", (
    word_column("run", "run", "Identifier of the run."),
    count("ranks_seen", "recorded ranks", "Ranks that left a log."),
    count("world_size", "world size", "Ranks of the job; missing if no process recorded it."),
    shared.ranks_column("ranks_missing", "", 'Ranks that left no log, such as "2-3,7"; "" if there is none.'),
    shared.ranks_column("ranks_not_selected", "", "Ranks that COMMTRACE_RANKS left out."),
    text_column("steps_selected", "", 'Steps that COMMTRACE_STEPS selected; "": all.'),
    count("hosts", "", "Hosts of the recorded ranks; missing if an imported log does not state them."),
    count("processes", "", "Processes that left a log."),
    count("without_end", "", "Processes that are alive or ended without closing their log."),
    count("records", "", "Calls in the log."),
    *_COUNTERS, _NOT_FOUND,
    count("simulated", "", "Processes of a dry run, which sends nothing."),
    _FIRST_ERROR,
    count("files_cut", "", "Files of the log whose end is missing."),
    count("files_foreign", "", "Files in the directory that are not of this run."),
    count("files_unreadable", "", "Files of the log that could not be read."),
    count("files_missing", "", "Files of the log that are not there."),
    count("files_garbled", "", "Files of the log with invalid contents."),
))  # fmt: skip
STATES: Final = TableSpec("states", "Call states", "A row per state, the most frequent first.", (
    word_column("state", "state",
        '"complete": its end is known; "returned": its end was not observed; "unobservable": the recorder cannot '
        'see its end; "begun": it was in progress when the log ended; "failed": it raised an exception.'),
    count("calls", "calls", "Calls in this state."),
    share("share", "share", "Share of all calls."),
))  # fmt: skip
PROCESSES: Final = TableSpec("processes", "Processes", "A row per process.", (
    shared.RANK,
    word_column("host", "host", "Host name."),
    column("", str, "pid", "pid", "Process identifier."),
    word_column("recorder", "recorder", '"native" or "python".'),
    flag("simulated", "", "Whether it is a process of a dry run."),
    column("ns", format_count, "started_unix_ns", "started", "Start, since 1970-01-01 UTC."),
    count("records", "", "Its calls in the log."),
    *_COUNTERS, _FIRST_ERROR,
    word_column("end", "end", "How it ended; missing if it is alive or ended without closing its log."),
    _NOT_FOUND,
), merge_by="rank")  # fmt: skip
BLIND_SPOTS: Final = TableSpec("blind_spots", "Blind spots", "A row per blind spot.", (
    text_column("blind_spot", "blind spot", "What is not observed."),
    count("processes", "", "Processes that it applies to."),
))  # fmt: skip
NOTES: Final = TableSpec("notes", "Log problems", "A row per note.", (
    word_column("kind", "kind", 'What is wrong: "cut", "foreign", "unreadable", "missing", "garbled" ...'),
    text_column("path", "path", "File or directory."),
    text_column("what", "what", "What is wrong with it."),
    text_column("consequence", "consequence", "What follows for the numbers of the report."),
))  # fmt: skip

FILE_PROBLEMS: Final = ("cut", "foreign", "unreadable", "missing", "garbled")
"""Kinds of notes on files of the log."""

COUNTERS: Final = ("calls", *WITHOUT_RECORD, "hook_errors")
NOT_SELECTED: Final = "not_selected"


def _partial(block: RecordBlock) -> pd.DataFrame:
    return table_by(block.distinct_calls_by("process"), ("process", "state"), {})


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
    rows = [(note.kind, str(note.path), note.text, note.consequence) for note in notes]
    return pd.DataFrame(rows, columns=NOTES.column_names)


def _states(table: pd.DataFrame) -> pd.DataFrame:
    states = table.groupby(["state"], as_index=False)[["calls"]].sum()
    states["share"] = states["calls"] / states["calls"].sum()
    return states.sort_values("calls", ascending=False, kind="stable", ignore_index=True)


def _processes(table: pd.DataFrame, run: RecordedRun) -> pd.DataFrame:
    records = table.groupby("process")["calls"].sum().to_dict()
    rows = [_process(process, int(records.get(number, 0))) for number, process in enumerate(run.processes)]
    return pd.DataFrame(rows, columns=PROCESSES.column_names).astype(
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
        "hosts": _hosts(processes, run),
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


def _hosts(processes: pd.DataFrame, run: RecordedRun) -> int | None:
    """Return the number of hosts; None if an imported process does not state its host."""
    if any(process.tables.source.get("host_known") is False for process in run.processes):
        return None
    return int(processes["host"].nunique())


def _blind_spots(run: RecordedRun) -> pd.DataFrame:
    processes: Counter[str] = Counter()
    for process in run.processes:
        blind_spots = process.tables.process.get("blind_spots")
        processes.update(map(str, blind_spots if isinstance(blind_spots, list) else ()))
    return pd.DataFrame(processes.most_common(), columns=["blind_spot", "processes"])


ANALYSIS: Final = Analysis("coverage", _partial, merge_sums("process", "state"), _finish, reads_cells=True)
