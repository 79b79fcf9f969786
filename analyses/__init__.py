"""Analyses of a run, one module each. Each makes tidy tables, which `table_specs` describes.

An analysis is a fold over the records (`fold_engine`): `partial` makes a small table of one block of records, `merge`
makes one table of many, `finish` makes the tables to show. So a log larger than memory works, and processes or a
cluster can share the work. To add an analysis, write a module with an `Analysis` and append it to
`analysis_catalog.ANALYSES`.

Definitions that hold in every table:

* Counts and bytes are sums over the recorded ranks (those that left a log), unless the column says "per rank".
* `payload_bytes` and `wire_bytes` follow `commtrace.volume`; wire bytes are the least that the algorithm sends, never
  measured, and missing where they are not known for every call of the row.
* Every recorded call counts, failed and unfinished ones too; the table `states` has their numbers.
* `step` -1 is start-up, everything before the first training step; -2 are evaluations.
* Missing values mean "not known", never zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

    from commtrace.reading.recorded_run import RecordedRun


def analyse(
    run: RecordedRun, *, details: bool = False, across_ranks: bool = True, agreeing: bool = True
) -> dict[str, pd.DataFrame]:
    """Compute the tables of all analyses in one pass over the records, by the run's executor.

    Args:
        run: The run to analyse.
        details: Whether to add the tables that only figures use.
        across_ranks: Whether to add the tables that need all calls of all ranks matched.
        agreeing: Whether `expected` and `reconciliation` have the steps in which nothing differs.

    Returns:
        The tables by name.
    """
    from . import reconciliation
    from .analysis_catalog import ACROSS_RANKS, ANALYSES, DETAILS
    from .fold_engine import fold

    with_theory = reconciliation.ANALYSIS if agreeing else reconciliation.DIFFERENCES
    more = (*(ACROSS_RANKS if across_ranks else ()), *(DETAILS.values() if details else ()))
    return fold(run, (*ANALYSES, with_theory, *more))


def detail(run: RecordedRun, name: str) -> pd.DataFrame | None:
    """Compute a table that only figures use; None if there is none of this name."""
    from .analysis_catalog import DETAILS
    from .fold_engine import fold

    return fold(run, [DETAILS[name]])[name] if name in DETAILS else None


def tables_to_store(run: RecordedRun) -> Iterator[tuple[str, dict[str, pd.DataFrame]]]:
    """Yield names and tables of analyses that `commtrace pack` stores, so that reports and checks read no records.

    Not stored are stuck calls, for which few records are read, and ACROSS_RANKS.
    """
    from . import fold_engine, reconciliation
    from .across_ranks import stuck_calls
    from .analysis_catalog import ANALYSES, DETAILS

    analyses = [analysis for analysis in ANALYSES if analysis is not stuck_calls.ANALYSIS]
    return fold_engine.tables_to_store(run, [*analyses, reconciliation.ANALYSIS, *DETAILS.values()])
