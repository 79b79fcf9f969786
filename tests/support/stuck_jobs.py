"""Helpers for tests of jobs that hang, which also use the fixture `short_waits`."""

from __future__ import annotations

import time
from pathlib import Path

import pandas as pd

from commtrace.analyses.analysis_catalog import TABLES
from commtrace.errors import LogError
from commtrace.run import open_run


def stuck_calls_of(log: Path) -> pd.DataFrame:
    """Return the stuck calls; none before there is a log."""
    try:
        return open_run(log, recover=True).table("stuck_calls")
    except LogError:
        return pd.DataFrame(columns=TABLES["stuck_calls"].column_names)


def wait_for_stuck_calls(log: Path, limit: float = 60) -> pd.DataFrame:
    """Return the stuck calls as soon as there are any. Fail the test after `limit` seconds."""
    deadline = time.monotonic() + limit
    while not len(calls := stuck_calls_of(log)):
        assert time.monotonic() < deadline, f"no diagnosis after {limit} s"
        time.sleep(0.3)
    return calls


def others(size: int) -> str:
    """Return all ranks but rank 1, as tables show them."""
    return "0" if size == 2 else "0,2" if size == 3 else f"0,2-{size - 1}"
