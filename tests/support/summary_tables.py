"""Comparison of a summary's tables with a full log's, of the same program or of the same calls."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Final

import pandas as pd
import processes

from commtrace.analyses.grouping import rows_of
from commtrace.durations import MEASURES, durations
from commtrace.recording.summary import Summary
from commtrace.recording.summary_files import append_rows, table_path
from commtrace.run import Run, open_run
from commtrace.summary_format import RELATIVE_ERROR, TABLES

EXACT: Final = (
    "volume_by_operation",
    "volume_by_role",
    "volume_by_role_and_operation",
    "volume_by_phase",
    "volume_by_purpose",
    "volume_by_site",
    "whole_job",
    "volume_by_step",
    "steady_step",
    "message_sizes",
    "message_size_bins",
    "states",
    "ranks",
    "theory",
    "expected",
    "reconciliation",
    "waterfall",
    "waterfall_by_role",
)


def counted(run: Run) -> dict[str, pd.DataFrame]:
    """Return the tables of EXACT, in an order that does not depend on the log, and the call counts of `host_time`."""
    tables = {name: run.table(name) for name in EXACT}
    times = run.table("host_time")
    tables["host_time"] = times.assign(calls=times["calls_known"] + times["calls_unknown"])[["op", "measure", "calls"]]
    return {name: table.sort_values([*table.columns], ignore_index=True) for name, table in tables.items()}


def assert_equal(full: Run, summary: Run) -> None:
    """Assert that all counts and sizes are equal, and that the summary has every call."""
    assert (summary.is_summary, full.is_summary) == (True, False)
    expected, found = counted(full), counted(summary)
    for name, table in expected.items():
        pd.testing.assert_frame_equal(table, found[name], check_dtype=False, obj=name)
    coverage = summary.table("coverage").iloc[0]
    assert coverage["records"] == coverage["calls"] == full.table("coverage").iloc[0]["calls"]
    assert (coverage["not_found"], len(summary.notes)) == (0, 0)


def summarized(full: Path, folder: Path, chance: random.Random) -> Run:
    """Fold the records of a full log into summaries, in random parts and in random order; return the run."""
    shutil.copytree(full, folder)
    for tables in folder.glob("*/*/*.jsonl"):
        left = processes.read(tables)
        for segment in tables.parent.glob(f"{tables.stem}.*.npy"):
            segment.unlink()
        summary = Summary(left.tables["process"][0]["rank"], 10_000_000, 0.0)
        begin = 0
        while begin < len(left.records):
            part = left.records[begin : begin + chance.randint(1, 200)]
            begin += len(part)
            summary.add(part[chance.sample(range(len(part)), len(part))])
            summary.close_steps(summary.last_step - chance.randint(0, 3))
            if chance.random() < 0.2:
                summary.flush(float(begin))
        summary.finish()
        for name, dtype in TABLES.items():
            append_rows(table_path(tables.parent, tables.stem, name), dtype, 0, b"".join(summary.rows[name]))
        with open(tables, "a") as file:
            file.write(json.dumps({"table": "stats", **left.stats, "summarized": len(left.records)}) + "\n")
    return open_run(folder)


def assert_times_are_equal(full: Run, summary: Run) -> None:
    """Assert, for the same calls, that counts, sums and bandwidths are equal, and quantiles within their error."""
    pd.testing.assert_frame_equal(full.table("bandwidth"), summary.table("bandwidth"))
    same = ["op", "measure", "calls_known", "calls_unknown", "max_ns", "sum_ns"]
    expected, found = full.table("host_time"), summary.table("host_time")
    pd.testing.assert_frame_equal(expected[same], found[same])
    times: dict[tuple[str, str], list[int]] = {}
    for left in processes.read_all(full.log.path):
        for kind in left.tables["kinds"]:
            records = left.records[left.records["kind"] == kind["id"]]
            for measure in MEASURES:
                times.setdefault((kind["op"], measure), []).extend(durations(measure, records).tolist())
    for row in rows_of(found[found["calls_known"] > 0]):
        known = sorted(time for time in times[str(row.op), str(row.measure)] if time >= 0)
        for share, quantile in ((0.5, row.p50_ns), (0.99, row.p99_ns)):
            true = known[math.ceil(share * len(known)) - 1]
            assert abs(quantile - true) <= RELATIVE_ERROR * true, row
