"""Warnings and findings at the top of a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from commtrace.analyses.coverage import FILE_PROBLEMS
from commtrace.analyses.fold_engine import rows_of
from commtrace.analyses.steps import ALL
from commtrace.formatting import format_bytes, format_plural, format_share, format_signed, is_known
from commtrace.reading.recorded_run import RecordedRun

from .log_facts import lost_calls


def warnings(run: RecordedRun, tables: Mapping[str, pd.DataFrame]) -> Iterator[str]:
    """Yield warnings about incomplete or unreliable data."""
    yield from (f"{note.path} {note.what}; {note.consequence}" for note in run.notes if note.kind == "runs")
    coverage = tables["coverage"].iloc[0]
    if coverage["ranks_missing"]:
        yield f"Ranks {coverage['ranks_missing']} left no log: sums and means are over the recorded ranks."
    if lost := lost_calls(coverage):
        yield f"Some calls were counted but not recorded ({lost}): volumes are lower bounds."
    if coverage["without_end"]:
        yield f"{format_plural(int(coverage['without_end']), 'process', 'processes')} ended early, or still run."
    if coverage["simulated"]:
        yield "Simulated, a dry run: the calls are the job's, nothing was sent, and there are no times."
    if is_known(coverage["hook_errors"]) and coverage["hook_errors"]:
        errors = format_plural(int(coverage["hook_errors"]), "call")
        yield f"The hooks failed on {errors}: their data is incomplete."
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
    waterfall = tables.get("waterfall")
    if waterfall is not None and len(waterfall):
        sums = waterfall.groupby("kind")["bytes"].sum()
        form, measured = sums.get("closed form", 0), sums.get("measured", 0)
        if form:
            yield (
                f"A rank sends {measured / form:.2f} times what the closed form predicts, {format_bytes(form)} a step"
                f"{_largest_cause(waterfall)}."
            )


def _largest_cause(waterfall: pd.DataFrame) -> str:
    causes = waterfall.loc[waterfall["kind"].isin(["cause", "unexplained"]) & (waterfall["bytes"] != 0)]
    if not len(causes):
        return ""
    cause = causes.iloc[int(causes["bytes"].abs().to_numpy().argmax())]
    return f"; largest difference: {cause['label']}, {format_signed(cause['bytes'], format_bytes)}"
