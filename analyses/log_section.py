"""Section of the log: warnings and facts about its coverage, damage, and the tracing cost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pandas as pd

from commtrace.formatting import format_count, format_moment, format_plural, format_share, is_known
from commtrace.rank_ranges import format_ranks, name_ranks, shorten_rank_list
from commtrace.reading.log_notes import Note, merge_notes
from commtrace.reading.recorded_run import RecordedRun
from commtrace.schema import WITHOUT_RECORD
from commtrace.summary_format import RELATIVE_ERROR

from . import tracing_cost
from .coverage import ANALYSIS as COVERAGE_ANALYSIS
from .coverage import BLIND_SPOTS, COVERAGE, FILE_PROBLEMS, NOTES, PROCESSES, STATES
from .dry_run_effects import failures, uncomputed_values, unwritten_files
from .grouping import rows_of
from .job_summary import summarize_job
from .sections import Block, Listing, NamedTexts, Report, Section, Tables
from .tracing_cost import describe_cost


def warnings(run: RecordedRun, tables: Tables) -> Iterator[str]:
    """Yield warnings about incomplete or unreliable data."""
    yield from (f"{note.path} {note.text}; {note.consequence}" for note in run.notes if note.kind == "runs")
    coverage = tables["coverage"].iloc[0]
    missing, not_selected = (coverage[f"ranks_{name}"] or "" for name in ("missing", "not_selected"))
    if missing:
        yield f"{name_ranks(missing, 'Rank')} left no log: sums and means are over the recorded ranks."
    if not_selected:
        were = "was" if not_selected.isdecimal() else "were"
        yield (
            f"{name_ranks(not_selected, 'Rank')} {were} not recorded because of COMMTRACE_RANKS: sums and means are "
            "over the recorded ranks."
        )
    if coverage["not_selected"]:
        yield (
            f"{format_count(coverage['not_selected'])} calls of steps outside COMMTRACE_STEPS="
            f"{coverage['steps_selected']} were not recorded: sums are over the recorded steps."
        )
    if lost := lost_calls(coverage):
        total = f" of {int(coverage['calls']):,}" if is_known(coverage["calls"]) else ""
        yield f"Recorded {coverage['records']:,}{total} calls ({lost}): volumes are lower bounds."
    if coverage["without_end"] and not failures(run):
        processes = format_plural(int(coverage["without_end"]), "process", "processes")
        yield f"{processes} ended early, or {'is' if coverage['without_end'] == 1 else 'are'} still running."
    if run.is_summary and run.source:
        yield (
            "The source counts calls and does not say when each was: the log is a summary. Waits, clocks, delays, step "
            "times and timelines cannot be known from it."
        )
    elif run.is_summary:
        yield (
            f"The log is a summary (COMMTRACE_MODE=summary): counts and sizes are exact, times of calls within "
            f"{format_share(RELATIVE_ERROR)}. Waits, clocks, delays, step times and timelines cannot be known from it: "
            "they cover only the calls that were recorded in full, if any."
        )
    yield from _slower_recorder(run)
    yield from _untimed_calls(run)
    yield from failures(run)
    if coverage["simulated"]:
        yield "Simulated, a dry run: the calls are the job's, nothing was sent, and there are no times."
    if is_known(coverage["hook_errors"]) and coverage["hook_errors"]:
        errors, first = format_plural(int(coverage["hook_errors"]), "time"), coverage["first_error"]
        last_line = f" ({first.splitlines()[-1]})" if is_known(first) else ""
        yield f"The hooks failed {errors}{last_line}: data is incomplete."
    damaged = sum(int(coverage[f"files_{kind}"]) for kind in FILE_PROBLEMS)
    if damaged:
        yield f"Damaged or foreign files in the log: {damaged:,}; see the notes on the log."


def _slower_recorder(run: RecordedRun) -> Iterator[str]:
    """Yield why the Python recorder was used, by library and reason; a library that made no call is left out."""
    ranks: dict[tuple[str, str], list[int]] = defaultdict(list)
    for process in run.processes:
        reasons = (process.tables.setup or {}).get("slower_recorder")
        used = {"mpi4py" if kind.api == "mpi" else kind.api for kind in process.tables.kinds.values()}
        for library, reason in reasons.items() if isinstance(reasons, Mapping) else ():
            if library in used:
                ranks[library, str(reason)].append(process.rank)
    for (library, reason), members in ranks.items():
        where = "" if len(members) == len(run.processes) else f" on {name_ranks(format_ranks(members))}"
        yield (
            f"Calls of {library}{where} were recorded by the Python recorder, which costs far more per call than the "
            f"native one and observes fewer ends: {reason}."
        )


def _untimed_calls(run: RecordedRun) -> Iterator[str]:
    """Yield how many calls that were to be timed on a device have no times."""
    if untimed := sum(process.counter("untimed") for process in run.processes):
        yield (
            f"COMMTRACE_DEVICE_TIMES=1, but {format_plural(untimed, 'call')} on a device could not be timed: the "
            "device is neither CUDA nor HIP, or too many calls were in flight at once."
        )


def facts(run: RecordedRun, tables: Tables) -> dict[str, str]:
    """Return facts about a run and its log by name; facts that do not apply are left out."""
    coverage, began = tables["coverage"].iloc[0], tables["processes"]["started_unix_ns"].min()
    texts = {
        "run": run.id,
        "job": summarize_job(run),
        "log": str(run.log.path),
        "imported from": _source(run),
        "ranks": _ranks(coverage),
        "began": format_moment(began) + " UTC" if is_known(began) else "",
        "dry run": _simulated(run),
        "processes": _processes(coverage),
        "calls": _calls(coverage),
        "ends": "" if run.simulated else _states(tables["states"]),
        "hook errors": _hook_errors(coverage),
        "damage": _damage(run),
        "recorder": recorder_line(tables["processes"]),
        "tracing cost": ""
        if run.simulated or run.source
        else describe_cost(tables["tracing_cost"], int(coverage["processes"])),
    }
    return {name: text for name, text in texts.items() if text}


def log_lists(run: RecordedRun, tables: Tables) -> dict[str, list[str]]:
    """Return values that are not observed and problems of the log: lists by title, empty ones left out."""
    lists = {
        "Values that a dry run does not compute, used at": uncomputed_values(run),
        "Files that the program would have written": unwritten_files(run),
        "Not known from the source" if run.source else "Blind spots: not observed by the hooks": [
            str(text) for text in tables["blind_spots"]["blind_spot"]
        ],
        "Notes on the log": [_note(note, run) for note in merge_notes(run.notes) if note.kind != "runs"],
    }
    return {title: texts for title, texts in lists.items() if texts}


def _note(note: Note, run: RecordedRun) -> str:
    if note.kind == "salvage":
        return note.text
    path = note.path.relative_to(run.log.path) if note.path.is_relative_to(run.log.path) else note.path
    return f"{path}: {note.text}; {note.consequence}"


def _source(run: RecordedRun) -> str:
    if not run.source:
        return ""
    sources = (process.tables.source.get("files") or () for process in run.processes)
    files = [*dict.fromkeys(str(file) for paths in sources for file in paths)]
    return f"{run.source}: {files[0]}" + (f" and {len(files) - 1:,} more" if files[1:] else "") if files else run.source


def _ranks(coverage: pd.Series[Any]) -> str:
    hosts = "hosts not known"
    if is_known(coverage["hosts"]):
        hosts = f"on {format_plural(int(coverage['hosts']), 'host')}"
    seen = int(coverage["ranks_seen"])
    if not is_known(coverage["world_size"]):
        return f"{format_plural(seen, 'rank')} recorded, {hosts}; the world size is not known"
    text = f"{seen:,} of {int(coverage['world_size']):,} recorded, {hosts}"
    for title in ("not selected", "missing"):
        if ranks := coverage[f"ranks_{title.replace(' ', '_')}"]:
            text += f"; {title}: {shorten_rank_list(ranks)}"
    return text


def _processes(coverage: pd.Series[Any]) -> str:
    total, without_end = int(coverage["processes"]), int(coverage["without_end"])
    return f"{total:,}; alive or ended early: {without_end:,}" if without_end else f"{total:,}, all closed their logs"


def _calls(coverage: pd.Series[Any]) -> str:
    text = f"{coverage['records']:,} recorded"
    if not is_known(coverage["calls"]):
        return f"{text}; not every process wrote how many it counted"
    lost = lost_calls(coverage)
    left_out = f"; {format_count(coverage['not_selected'])} of steps not selected" if coverage["not_selected"] else ""
    return f"{text} of {int(coverage['calls']):,} counted" + (f": {lost}" if lost else "") + left_out


def lost_calls(coverage: pd.Series[Any]) -> str:
    """Return the calls that were counted and are not in the log, such as "8 dropped, 2 not found"; "" if none."""
    counts = {name.replace("_", " "): coverage[name] for name in (*WITHOUT_RECORD, "not_found")}
    return ", ".join(f"{format_count(count)} {name}" for name, count in counts.items() if is_known(count) and count)


def _states(states: pd.DataFrame) -> str:
    texts = [f"{row.state} {format_share(row.share)} ({format_count(row.calls)})" for row in rows_of(states)]
    return ", ".join(texts) or "no call"


def _simulated(run: RecordedRun) -> str:
    if not run.simulated:
        return ""
    text = "simulated: the calls are the job's, nothing was sent, and there are no times"
    if any(process.tables.process.get("simulated_device") == "cuda" for process in run.processes):
        text += "; its CUDA devices were simulated"
    represented = sum(run.stands_for.values())
    if represented == len(run.ranks):
        return text
    ranks = "all" if represented == run.world_size else f"{represented:,}"
    return f"{text}; the {format_plural(len(run.ranks), 'rank')} that ran represent {ranks} of the job"


def _hook_errors(coverage: pd.Series[Any]) -> str:
    errors, first = coverage["hook_errors"], coverage["first_error"]
    if not is_known(errors) or (not errors and not is_known(first)):
        return ""
    return f"{int(errors):,}" + (f"; the first: {first}" if is_known(first) else "")


def _damage(run: RecordedRun) -> str:
    counts = Counter(note.kind for note in run.notes)
    names = {"unreadable": "not readable"}
    texts = [f"{format_plural(counts[kind], 'file')} {names.get(kind, kind)}" for kind in FILE_PROBLEMS if counts[kind]]
    return "; ".join(texts)


def recorder_line(processes: pd.DataFrame) -> str:
    """Return which recorder was used, and how to get the native one; "" if no process wrote it."""
    counts = processes["recorder"].dropna().value_counts()
    if not len(counts):
        return ""
    text = str(counts.index[0])
    if len(counts) > 1:
        text = " and ".join(f"{name} in {format_count(count)}" for name, count in counts.items())
    if "python" not in counts:
        return text
    return f"{text}; `commtrace build` builds the native one, which costs far less per call and observes more ends"


def _show(report: Report) -> Iterator[Block]:
    if report.run is None:
        return
    yield NamedTexts(facts(report.run, report.tables))
    for title, texts in log_lists(report.run, report.tables).items():
        yield Listing(texts, title)


LOG_SECTION: Final = Section(
    "log",
    "The log",
    (COVERAGE, STATES, PROCESSES, BLIND_SPOTS, NOTES, tracing_cost.TRACING_COST),
    (COVERAGE_ANALYSIS, tracing_cost.ANALYSIS),
    blocks=_show,
    warnings=warnings,
)
