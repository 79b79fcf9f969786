"""What tests of jobs that hang share; the fixture `short_waits` belongs to it."""

from __future__ import annotations

import time
from pathlib import Path

import pandas as pd

from commtrace.analyses.table_specs import TABLES
from commtrace.errors import LogError
from commtrace.run import open_run


def stuck_calls_of(log: Path) -> pd.DataFrame:
    """The diagnosis; empty where there is none, and before there is a log."""
    try:
        return open_run(log).table("stuck_calls")
    except LogError:
        return pd.DataFrame(columns=TABLES["stuck_calls"].column_names)


def wait_for_stuck_calls(log: Path, limit: float = 60) -> pd.DataFrame:
    """The diagnosis as soon as there is one."""
    deadline = time.monotonic() + limit
    while not len(calls := stuck_calls_of(log)):
        assert time.monotonic() < deadline, f"no diagnosis after {limit} s"
        time.sleep(0.3)
    return calls


def others(size: int) -> str:
    """All ranks but rank 1, as tables have them."""
    return "0" if size == 2 else "0,2" if size == 3 else f"0,2-{size - 1}"
