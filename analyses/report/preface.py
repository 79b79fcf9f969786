"""The beginning of a report: which run, what the log covers, what tracing cost, and what the hooks cannot see."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any, Final

import pandas as pd
from rich.console import RenderableType
from rich.text import Text

from commtrace.formatting import (
    format_count,
    format_duration,
    format_plural,
    format_share,
    format_small_share,
    is_known,
)
from commtrace.reading.log_notes import Note
from commtrace.reading.run import RecordedRun
from commtrace.reading.table_reader import Row
from commtrace.text_tables import paragraph

NOTES: Final = 12
"""Notes that are shown; the rest are counted."""

_LABEL: Final = 14
_WARNING: Final = "yellow"


def render(run: RecordedRun, tables: Mapping[str, pd.DataFrame], width: int) -> Iterator[RenderableType]:
    """The preface, top to bottom."""
    yield Text(f"Run {run.id}" + (", simulated" if run.simulated else ""), style="bold")
    for note in newest(run):
        yield paragraph(note, width, first="! ", style="bold yellow")
    for name, text in facts(run, tables):
        yield paragraph(text, width, first=name.ljust(_LABEL))
    yield from _list("A dry run does not compute what these lines ask for:", unknown(run), width)
    yield from _list("Hooks cannot see:", blind_spots(tables), width)
    yield from _list("Notes on this log:", notes(run), width)


def facts(run: RecordedRun, tables: Mapping[str, pd.DataFrame]) -> list[tuple[str, str]]:
    """What is known of the run and of the log, as names and texts."""
    coverage = tables["coverage"].iloc[0]
    lines = [
        ("log", str(run.log.path)),
        ("began", _began(tables["processes"])),
        ("dry run", _simulated(run)),
        ("job", job_line(run)),
        ("ranks", _ranks(coverage)),
        ("processes", _processes(coverage)),
        ("calls", _calls(coverage)),
        ("ends", "" if run.simulated else _states(tables["states"])),
        ("hook errors", _hook_errors(coverage)),
        ("damage", _damage(run)),
        ("recorder", recorder_line(tables["processes"])),
        ("tracing cost", "" if run.simulated else _cost(tables["tracing_cost"], int(coverage["processes"]))),
    ]
    return [(name, text) for name, text in lines if text]


def newest(run: RecordedRun) -> list[str]:
    """That the directory holds other runs too, where it does."""
    return [f"{note.path} {note.what}; {note.consequence}" for note in run.notes if note.kind == "runs"]


def blind_spots(tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """What the hooks cannot see."""
    return [str(spot) for spot in tables["blind_spots"]["blind_spot"]]


def unknown(run: RecordedRun) -> list[str]:
    """Of a dry run: the program's lines that asked for numbers which it does not compute, and how it went on."""
    rows = [row for process in run.processes for row in process.tables.notices]
    texts = (f"{row.get('file')}:{row.get('line')} {row.get('function')}: {row.get('what')}" for row in rows)
    return list(dict.fromkeys(texts))


def notes(run: RecordedRun) -> list[str]:
    """What is damaged in the log, and what follows from it."""
    return [_note(note, run) for note in run.notes if note.kind != "runs"]


def _list(title: str, texts: list[str], width: int) -> Iterator[RenderableType]:
    if texts:
        yield Text()
        yield Text(title, style=f"bold {_WARNING}")
    for text in texts[:NOTES]:
        yield paragraph(text, width, first="- ")
    if len(texts) > NOTES:
        yield paragraph(f"and {len(texts) - NOTES:,} more, all in --json", width, first="- ")


def _note(note: Note, run: RecordedRun) -> str:
    if note.kind == "salvage":
        return note.what
    path = note.path.relative_to(run.log.path) if note.path.is_relative_to(run.log.path) else note.path
    return f"{path}: {note.what}; {note.consequence}"


def _began(processes: pd.DataFrame) -> str:
    first = processes["started_unix_ns"].min()
    if not is_known(first):
        return ""
    return datetime.fromtimestamp(int(first) // 10**9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def job_line(run: RecordedRun) -> str:
    """What is trained, in a line; "" where nothing was captured."""
    job = run.job
    if job is None:
        return "simulated" if run.simulated else ""
    parts = [str(job[key]) for key in ("engine", "source") if job.get(key)][:1]
    parts += [f"ZeRO stage {job['zero_stage']}"] if job.get("zero_stage") is not None else []
    parts += [str(job["precision"])] if job.get("precision") else []
    firsts = [next(iter(process.tables.jobs.values()), None) for process in run.processes]
    counts = {number for first in firsts if (number := parameters(first)) is not None}
    if counts:
        several = f"{min(counts):,} to " if len(counts) > 1 else ""
        parts.append(f"{several}{max(counts):,} parameters" + (" per rank" if several else ""))
    most = max(len(process.tables.jobs) for process in run.processes)
    of_several = f" (the first of {most} models)" if most > 1 else ""
    return ", ".join(parts) + of_several + (", simulated" if run.simulated else "")


def parameters(job: Row | None) -> int | None:
    """Elements of all parameters of a job row, None where it does not say."""
    rows = (job or {}).get("parameters")
    try:
        return sum(math.prod(int(length) for length in row["shape"]) for row in rows) if rows else None
    except (KeyError, TypeError, ValueError):
        return None


def _ranks(coverage: pd.Series[Any]) -> str:
    hosts = f"on {format_plural(int(coverage['hosts']), 'host')}"
    seen = int(coverage["ranks_seen"])
    if not is_known(coverage["world_size"]):
        return f"{format_plural(seen, 'rank')} seen, {hosts}; how many there are is not known"
    text = f"{seen:,} of {int(coverage['world_size']):,} seen, {hosts}"
    return text + (f"; missing: {coverage['ranks_missing']}" if coverage["ranks_missing"] else "")


def _processes(coverage: pd.Series[Any]) -> str:
    total, without = int(coverage["processes"]), int(coverage["without_end"])
    return f"{total:,}, all ended in order" if not without else f"{total:,}; alive or ended early: {without:,}"


def _calls(coverage: pd.Series[Any]) -> str:
    text = f"{coverage['records']:,} recorded"
    if is_known(coverage["calls"]):
        gone = [f"{int(coverage[name]):,} {name}" for name in ("dropped", "removed", "lost") if coverage[name]]
        gone += (
            [f"{int(coverage['not_found']):,} not found"]
            if is_known(coverage["not_found"]) and coverage["not_found"]
            else []
        )
        return f"{text} of {int(coverage['calls']):,} counted" + (f": {', '.join(gone)}" if gone else "")
    return f"{text}; not every process wrote how many it counted"


def _states(states: pd.DataFrame) -> str:
    if not len(states):
        return "no call"
    return ", ".join(
        f"{row.state} {format_share(row.share)} ({format_count(row.calls)})" for row in states.itertuples(index=False)
    )


def _simulated(run: RecordedRun) -> str:
    if not run.simulated:
        return ""
    told = "simulated: the calls are the job's, nothing was sent, and there are no times"
    stood_for = sum(run.stands_for.values())
    if stood_for == len(run.ranks):
        return told
    every = "all" if stood_for == run.world_size else ""
    return f"{told}; the {format_plural(len(run.ranks), 'rank')} run stand for {every or f'{stood_for:,}'} of the job"


def _hook_errors(coverage: pd.Series[Any]) -> str:
    errors = coverage["hook_errors"]
    if not is_known(errors) or (not errors and not is_known(coverage["first_error"])):
        return ""
    return f"{int(errors):,}" + (f"; the first: {coverage['first_error']}" if is_known(coverage["first_error"]) else "")


def _damage(run: RecordedRun) -> str:
    words = {
        "cut": "cut",
        "foreign": "foreign",
        "unreadable": "not readable",
        "missing": "missing",
        "garbled": "garbled",
    }
    found = [(sum(note.kind == kind for note in run.notes), text) for kind, text in words.items()]
    return "; ".join(f"{format_plural(number, 'file')} {text}" for number, text in found if number)


def recorder_line(processes: pd.DataFrame) -> str:
    """Which recorder recorded, and what follows from it."""
    names = processes["recorder"].dropna().value_counts()
    if not len(names):
        return ""
    told = (
        " and ".join(f"{name} in {format_count(number)}" for name, number in names.items())
        if len(names) > 1
        else names.index[0]
    )
    if "python" not in names:
        return str(told)
    return f"{told}; `commtrace build` makes the native one, which costs a call far less and sees more ends"


def _cost(cost: pd.DataFrame, processes: int) -> str:
    known_cost = cost.dropna(subset=["share"])
    if not len(known_cost):
        return "not known"
    worst = known_cost.iloc[[int(known_cost["share"].to_numpy().argmax())]]
    mean = known_cost["calls_ns"].sum() / known_cost["calls"].sum() if known_cost["calls"].sum() else None
    each = f"{format_duration(mean)} a call, p99 {format_duration(known_cost['p99_ns'].max())}"
    most = (
        f", at most {format_small_share(worst['share'].iloc[0])} (rank {worst['rank'].iloc[0]})"
        if len(known_cost) > 1
        else ""
    )
    told = f"on {len(known_cost):,} of {processes:,} processes: " if len(known_cost) < processes else ""
    return (
        f"{told}{each}; with writing to disk {format_small_share(known_cost['share'].mean())} of the run's time{most}"
    )
