"""Warnings, findings, and facts about a run and its log (coverage, damage, tracing cost), for terminal and page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pandas as pd

from commtrace.analyses.coverage import FILE_PROBLEMS
from commtrace.analyses.grouping import rows_of
from commtrace.analyses.job_summary import summarize_job
from commtrace.analyses.report.dry_run_effects import failures, uncomputed_values, unwritten_files
from commtrace.analyses.steps import ALL
from commtrace.formatting import (
    MAX_SINGLE,
    format_bytes,
    format_count,
    format_duration,
    format_moment,
    format_plural,
    format_ranks,
    format_share,
    format_signed,
    format_small_share,
    is_known,
    shorten_names,
    shorten_ranks,
)
from commtrace.reading.log_notes import Note, merge_notes
from commtrace.reading.recorded_run import RecordedRun
from commtrace.schema import WITHOUT_RECORD
from commtrace.summary_format import RELATIVE_ERROR

MAX_DELAYS: Final = 3
MAX_STEPS_NAMED: Final = 6
MAX_STUCK_CALLS: Final = 3
"""Stuck calls that the diagnosis describes."""


def diagnosis(tables: Mapping[str, pd.DataFrame]) -> Iterator[str]:
    """Yield the diagnosis of a job that hangs or died: incomplete calls, the ranks in them, where the others are."""
    calls, ranks = tables["stuck_calls"], tables["stuck_ranks"]
    for number, call in enumerate(rows_of(calls.head(MAX_STUCK_CALLS))):
        at_call = ranks.loc[ranks["stuck_call"] == number]
        failed = (at_call.loc[at_call["part"] == "waiting", "state"] == "failed").all()
        name = call.op + (f" {call.seq:,}" if is_known(call.seq) else "")
        yield shorten_ranks(f"{name} of ranks {call.group_ranks} {_stuck(call, failed=bool(failed))}.")
        shown = at_call if call.disagreement else at_call.loc[at_call["part"] == "absent"]
        where = shown.fillna({"state": "", "call": ""}).groupby(["part", "call", "state", "site", "end"], sort=False)
        for (part, last, state, site, end), group in [*where][:MAX_STUCK_CALLS]:
            of_group = shorten_ranks(format_ranks(group["rank"]))
            yield f"{_named(of_group, 'Rank')} {_place(part, last, state, site, group)}; {_END[end]}."
    if len(calls) > MAX_STUCK_CALLS:
        yield f"{format_plural(len(calls) - MAX_STUCK_CALLS, 'more stuck call')}: table `stuck_calls` (--json)."


def _named(ranks: str, noun: str = "rank") -> str:
    return f"{noun}{'' if ranks.isdecimal() else 's'} {ranks}"


def _stuck(call: Any, *, failed: bool) -> str:
    """Describe a stuck call; `failed`: it failed on all ranks that were in it."""
    texts = []
    since, site = f"at {format_moment(call.since_ns)} UTC", call.site or "call site not recorded"
    if call.waiting_ranks and failed:
        texts.append(f"it failed on {_named(call.waiting_ranks)} ({site})")
    elif call.waiting_ranks:
        waited = f"and stayed in it for at least {format_duration(call.waited_ns)}"
        texts.append(f"{_named(call.waiting_ranks)} entered it {since} {waited} ({site})")
    if call.absent_ranks:
        texts.append(f"{_named(call.absent_ranks)} did not enter it{', or ended in it' * failed}")
    if call.disagreement:
        texts.append(f"the ranks disagree ({call.disagreement})")
    elif not call.absent_ranks:
        texts.append("all its ranks entered it, and agree")
    return ("did not complete: " if failed else "has not completed: ") + "; ".join(texts)


def _place(part: str, call: str, state: str, site: str, ranks: pd.DataFrame) -> str:
    """Return where ranks are."""
    if not call:
        return "made no call"
    ago = format_duration((ranks["alive_ns"] - ranks["begin_ns"]).max())
    at = f" at {site}" if site else ""
    last_seen = f"{ago} before the {'rank was' if len(ranks) == 1 else 'ranks were'} last seen"
    return f"{'last entered' if part == 'absent' else 'entered'} {call}{at} ({state}), {last_seen}"


_END: Final = {
    "runs": "still running",
    "exit": "log closed",
    "died": "ended without closing its log",
    "unknown": "not known whether it is running",
}


SIGNIFICANT_WAIT = 0.2
"""Share of the time in calls from which waiting is a finding."""


def warnings(run: RecordedRun, tables: Mapping[str, pd.DataFrame]) -> Iterator[str]:
    """Yield warnings about incomplete or unreliable data."""
    yield from (f"{note.path} {note.what}; {note.consequence}" for note in run.notes if note.kind == "runs")
    coverage = tables["coverage"].iloc[0]
    missing, not_selected = (shorten_ranks(coverage[f"ranks_{name}"] or "") for name in ("missing", "not_selected"))
    if missing:
        yield f"{_named(missing, 'Rank')} left no log: sums and means are over the recorded ranks."
    if not_selected:
        were = "was" if not_selected.isdecimal() else "were"
        yield (
            f"{_named(not_selected, 'Rank')} {were} not recorded because of COMMTRACE_RANKS: sums and means are over "
            "the recorded ranks."
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
    if run.is_summary:
        yield (
            f"The log is a summary (COMMTRACE_MODE=summary): counts and sizes are exact, times of calls within "
            f"{format_share(RELATIVE_ERROR)}. Waits, clocks, delays, step times and timelines cannot be known from it: "
            "they cover only the calls that were recorded in full, if any."
        )
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


def warnings_of_runs(runs: Mapping[str, RecordedRun], tables: Mapping[str, Mapping[str, pd.DataFrame]]) -> list[str]:
    """Return the warnings of several runs, each after the name of its run."""
    return [f"{name}: {text}" for name, run in runs.items() for text in warnings(run, tables[name])]


def findings(tables: Mapping[str, pd.DataFrame]) -> Iterator[str]:
    """Yield the most important results of a run as sentences."""
    steady = tables["steady_step"]
    total = float(steady.loc[steady["op"] == ALL, "payload_bytes_per_rank"].sum())
    if total:
        largest = steady.loc[steady["op"] != ALL].nlargest(3, "payload_bytes_per_rank")
        shares = [(row.payload_bytes_per_rank / total, row.op) for row in rows_of(largest)]
        operations = ", ".join(f"{format_share(share)} {op}" for share, op in shares if share >= 0.01)
        yield f"A training step moves {format_bytes(total)} per rank: {operations}."
    sites = tables["volume_by_site"]
    if len(sites) and is_known(sites["payload_share"].iloc[0]) and sites["payload_bytes"].iloc[0]:
        site = sites["site"].iloc[0] or "which was not recorded"
        yield f"{format_share(sites['payload_share'].iloc[0])} of the payload comes from one call site, {site}."
    yield from _waiting(tables["waiting"].iloc[0], tables["clock_steps"])
    waterfall = tables.get("waterfall")
    if waterfall is not None and len(waterfall):
        sums = waterfall.groupby("kind")["bytes"].sum()
        form, measured = sums.get("closed form", 0), sums.get("measured", 0)
        if form:
            yield (
                f"A rank sends {measured / form:.2f} times what the closed form predicts, {format_bytes(form)} a step"
                f"{_largest_cause(waterfall)}."
            )
    yield from delay_sentences(tables)


def delay_sentences(tables: Mapping[str, pd.DataFrame]) -> Iterator[str]:
    """Yield a sentence for each of the largest delays."""
    for delay in rows_of(tables["delays"].head(MAX_DELAYS)):
        steps = f"in {format_plural(delay.delayed_steps, 'step')}"
        if delay.delayed_steps <= MAX_STEPS_NAMED:
            steps = f"in step{'' if delay.delayed_steps == 1 else 's'} {delay.steps}"
        regular = delay.recurrence.startswith("every ")
        when = {"every step": "in every step"}.get(delay.recurrence, delay.recurrence if regular else steps)
        yield (
            f"Rank {delay.rank} delays the job: {when} it computes {format_duration(delay.delay_ns)} longer than the "
            f"other ranks ({delay.phase}), {format_share(delay.share)} of the step."
        )
    ranks = tables["delays"]["rank"].unique().tolist()
    if len(ranks) > MAX_SINGLE:
        yield f"{len(ranks):,} ranks delay the job: {shorten_names(sorted(ranks))} (--sections step-time)."


def _waiting(waiting: pd.Series[Any], clock_steps: pd.DataFrame) -> Iterator[str]:
    """Yield the share of the time in calls that is certainly waiting, if it is large, and the clocks that jumped."""
    duration, least = waiting["duration_ns"], waiting["wait_min_ns"]
    if duration and least / duration >= SIGNIFICANT_WAIT:
        most = waiting["wait_max_ns"] / duration
        between = "" if most - least / duration < 0.005 else f" to {format_share(most)}"
        yield (
            f"{format_share(least / duration)}{between} of the time in calls is waiting for ranks that arrive later "
            "(--sections waiting)."
        )
    if len(clock_steps):
        hosts = shorten_names(sorted(set(clock_steps["host"])), most=MAX_SINGLE).replace(",", ", ")
        yield f"The clock of {hosts} jumped during the run (--sections clocks)."


def _largest_cause(waterfall: pd.DataFrame) -> str:
    causes = waterfall.loc[waterfall["kind"].isin(["cause", "unexplained"]) & (waterfall["bytes"] != 0)]
    if not len(causes):
        return ""
    cause = causes.iloc[int(causes["bytes"].abs().to_numpy().argmax())]
    return f"; largest difference: {cause['label']}, {format_signed(cause['bytes'], format_bytes)}"


def facts(run: RecordedRun, tables: Mapping[str, pd.DataFrame]) -> dict[str, str]:
    """Return facts about a run and its log by name; facts that do not apply are left out."""
    coverage, began = tables["coverage"].iloc[0], tables["processes"]["started_unix_ns"].min()
    texts = {
        "job": summarize_job(run),
        "log": str(run.log.path),
        "ranks": _ranks(coverage),
        "began": format_moment(began) + " UTC" if is_known(began) else "",
        "dry run": _simulated(run),
        "processes": _processes(coverage),
        "calls": _calls(coverage),
        "ends": "" if run.simulated else _states(tables["states"]),
        "hook errors": _hook_errors(coverage),
        "damage": _damage(run),
        "recorder": recorder_line(tables["processes"]),
        "tracing cost": "" if run.simulated else _cost(tables["tracing_cost"], int(coverage["processes"])),
    }
    return {name: text for name, text in texts.items() if text}


def log_lists(run: RecordedRun, tables: Mapping[str, pd.DataFrame]) -> dict[str, list[str]]:
    """Return values that are not observed and problems of the log: lists by title, empty ones left out."""
    lists = {
        "Values that a dry run does not compute, used at": uncomputed_values(run),
        "Files that the program would have written": unwritten_files(run),
        "Blind spots: not observed by the hooks": [str(text) for text in tables["blind_spots"]["blind_spot"]],
        "Notes on the log": [_note(note, run) for note in merge_notes(run.notes) if note.kind != "runs"],
    }
    return {title: texts for title, texts in lists.items() if texts}


def _note(note: Note, run: RecordedRun) -> str:
    if note.kind == "salvage":
        return note.what
    path = note.path.relative_to(run.log.path) if note.path.is_relative_to(run.log.path) else note.path
    return f"{path}: {note.what}; {note.consequence}"


def _ranks(coverage: pd.Series[Any]) -> str:
    hosts = f"on {format_plural(int(coverage['hosts']), 'host')}"
    seen = int(coverage["ranks_seen"])
    if not is_known(coverage["world_size"]):
        return f"{format_plural(seen, 'rank')} recorded, {hosts}; the world size is not known"
    text = f"{seen:,} of {int(coverage['world_size']):,} recorded, {hosts}"
    text += f"; not selected: {coverage['ranks_not_selected']}" if coverage["ranks_not_selected"] else ""
    return shorten_ranks(text + (f"; missing: {coverage['ranks_missing']}" if coverage["ranks_missing"] else ""))


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
    texts = [f"{format_plural(counts[kind], 'file')} {kind}" for kind in FILE_PROBLEMS if counts[kind]]
    return "; ".join(texts).replace("unreadable", "not readable")


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


def cost_per_call(cost: pd.DataFrame) -> str:
    """Return the cost of recording a call as text, separately for steady and first calls if the log has both."""
    split = cost.dropna(subset=["first_mean_ns", "steady_mean_ns"])
    first_calls, steady_calls = split["first_calls"], split["calls"] - split["first_calls"]
    if not steady_calls.sum():
        calls = cost["calls"].sum()
        return f"{format_duration(cost['calls_ns'].sum() / calls if calls else None)} a call"
    steady = (split["steady_mean_ns"] * steady_calls).sum() / steady_calls.sum()
    first = (split["first_mean_ns"] * first_calls).sum() / first_calls.sum()
    return f"{format_duration(steady)} a call (first call of a call site: {format_duration(first)})"


def _cost(cost: pd.DataFrame, processes: int) -> str:
    known = cost.dropna(subset=["share"])
    if not len(known):
        return "not known"
    text = f"{cost_per_call(known)}, p99 {format_duration(known['p99_ns'].max())}; with writing to disk "
    text += f"{format_small_share(known['share'].mean())} of the run's time"
    if len(known) < processes:
        text = f"on {len(known):,} of {processes:,} processes: {text}"
    if len(known) > 1:
        worst = known.iloc[int(known["share"].to_numpy().argmax())]
        text += f", at most {format_small_share(worst['share'])} (rank {int(worst['rank'])})"
    return text
