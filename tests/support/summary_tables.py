"""Tables that a summary has exactly: those of a full log of the same program."""

from __future__ import annotations

from typing import Final

import pandas as pd

from commtrace.run import Run

EXACT: Final = (
    "volume_by_operation",
    "volume_by_role",
    "volume_by_role_and_operation",
    "volume_by_phase",
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
    """The tables of EXACT, in an order that does not depend on the log, and the numbers of calls in `host_time`."""
    tables = {name: run.table(name) for name in EXACT}
    times = run.table("host_time")
    tables["host_time"] = times.assign(calls=times["calls_known"] + times["calls_unknown"])[["op", "measure", "calls"]]
    return {name: table.sort_values([*table.columns], ignore_index=True) for name, table in tables.items()}


def assert_equal(full: Run, summary: Run) -> None:
    """All counts and sizes are equal, and the summary has every call."""
    assert (summary.is_summary, full.is_summary) == (True, False)
    expected, found = counted(full), counted(summary)
    for name, table in expected.items():
        pd.testing.assert_frame_equal(table, found[name], check_dtype=False, obj=name)
    coverage = summary.table("coverage").iloc[0]
    assert coverage["records"] == coverage["calls"] == full.table("coverage").iloc[0]["calls"]
    assert (coverage["not_found"], len(summary.notes)) == (0, 0)
