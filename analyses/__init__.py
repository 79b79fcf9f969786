"""Questions asked of a run, one file each. Every answer is a tidy table, and none prints.

An analysis is a fold: `partial` makes a small table of one block of records, `merge` makes one of many, `finish` turns
the last into tables to show. So a log larger than memory works, and processes or a cluster can share the work.

Definitions that hold in every table:

* Counts and bytes are sums over the ranks that left a log, unless the column says "per rank".
* `payload_bytes` and `wire_bytes` follow `commtrace.volume`; wire bytes are what the algorithm must at least send,
  never measured, and missing where they do not follow for every call of the row.
* Every recorded call counts, failed and unfinished ones too; the table `states` says how many those are.
* `step` -1 is start-up, everything before the first training step.
* Missing values mean "not known", never zero.
"""

from __future__ import annotations

from concurrent.futures import Executor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from commtrace.reading.run import RecordedRun


def analyse(run: RecordedRun, executor: Executor | None = None, *, details: bool = False) -> dict[str, pd.DataFrame]:
    """The tables of all analyses by name, in one pass over the records; the executor, if any, works on the segments.

    `details`: with those tables that only figures are drawn from.
    """
    from .catalog import ANALYSES, DETAILS
    from .engine import fold

    return fold(run, (*ANALYSES, *DETAILS.values()) if details else ANALYSES, executor)


def detail(run: RecordedRun, name: str) -> pd.DataFrame | None:
    """A table that only figures are drawn from; None where none is called so."""
    from .catalog import DETAILS
    from .engine import fold

    return fold(run, [DETAILS[name]])[name] if name in DETAILS else None
