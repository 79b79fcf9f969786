"""Tables of the clocks of a run's hosts. See `table_specs` for the columns."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.fold_engine import NamedTables, RunAnalysis
from commtrace.analyses.table_specs import TABLES

from .clocks import Clocks


def clock_tables(run: AnalysedRun) -> NamedTables:
    """Return the tables `clocks` and `clock_steps`."""
    clocks = run.clocks
    rows = [_row(clocks, number) for number in range(len(clocks.hosts))]
    steps = [
        (clocks.hosts[number], clocks.hosts[clocks.reference], *step)
        for number, clock in enumerate(clocks.aligned)
        for step in (() if clock is None else clock.steps)
    ]
    return {
        "clocks": pd.DataFrame(rows, columns=TABLES["clocks"].column_names),
        "clock_steps": pd.DataFrame(steps, columns=TABLES["clock_steps"].column_names),
    }


def _row(clocks: Clocks, number: int) -> tuple[object, ...]:
    clock, names = clocks.aligned[number], (clocks.hosts[number], clocks.hosts[clocks.reference])
    if clock is None:
        return *names, *(None,) * 4, 0, 0
    lower, upper = clock.offsets(np.array([sum(clock.used_at) // 2]))
    slowest, fastest = (1e6 * rate for rate in clock.drift)
    drift = (slowest + fastest) / 2, (fastest - slowest) / 2
    return *names, int(lower[0] + upper[0]) // 2, *drift, clock.half_width_ns, clock.calls, len(clock.steps)


ANALYSIS: Final = RunAnalysis("clocks", clock_tables)
