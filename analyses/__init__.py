"""Analyses of a run, one module each: descriptions of its tables, their computation, and the section that shows them.

An analysis is a fold over the records (`fold_engine`): `partial` reduces a block of records to a small table, `merge`
combines such tables into one, and `finish` returns the final tables. Logs may therefore be larger than memory, and
processes or a cluster can share the work. To add an analysis, write a module with a `TableSpec`, an `Analysis` and a
`Section` (`sections`), and append the section to `analysis_catalog.SECTIONS`.

    analysis_catalog        all sections, and from them all analyses and tables
    analysed_run            a run, and the results that several analyses use
    fold_engine, record_blocks, grouping    one pass over the records; sums of integer columns
    robust_deviation        the deviation of values of which a few lie far away
    more_ranks              how times change with the number of ranks
    sections                what a section shows: blocks, findings, warnings, and how many rows of a table
    volume_tables, volume_by_purpose        bytes and calls by operation, dimension, phase, site, rank; by purpose
    steps, message_sizes    training steps; sizes of messages
    host_times              durations of calls, and bandwidths (algbw, busbw)
    network_efficiency      measured times beside those that a network should take
    overlap, limits, lost_overlap           computation beside communication; limits on it (`check --max-exposed`), and
                            what a run hides less of than accepted runs (`check --overlap-as`)
    expert_load             tokens of experts
    across_ranks/           clocks, waits, critical paths, stuck calls, ends of processes
    compare/                recorded calls and those that were expected
    scaling/, side_by_side  several runs
    what_if/                steps replayed with changes
    live/                   a run while it is recorded: its state, and incidents
    process_settings, setup_section         settings of one process; ranks and runs whose settings differ
    coverage                calls that were dropped, lost or not selected, and damage
    log_section             warnings and facts about them
    tracing_cost            what recording cost
    job_summary, dry_run_effects            the job in a line; what a dry run did not do
    timeline                calls in the order of time
    perfetto, protobuf_columns              the same for ui.perfetto.dev
    kineto_export           the same as torch.profiler writes it
    call_spans              times of calls on one clock, and lanes without overlaps, for both
    chakra_export           the last steps as execution traces for simulators
    report/, figures/, table_specs/         text, JSON and pages; figures; types of descriptions

Definitions that hold in every table:

* Counts and bytes are sums over the recorded ranks (those that left a log), unless the column says "per rank".
* `payload_bytes` and `wire_bytes` are defined in `commtrace.volume`. Wire bytes are the fewest that can be sent:
  computed, never measured, and missing unless they are known for every call of the row.
* Every recorded call counts, including calls that failed or did not end; the table `states` counts them.
* `step` is -1 for start-up, everything before the first training step, and -2 for evaluations.
* Missing values mean "not known", never zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pandas as pd

    from commtrace.reading.recorded_run import RecordedRun

    from .analysed_run import AnalysedRun
    from .fold_engine import AnyAnalysis


def analyse(
    run: AnalysedRun,
    *,
    details: bool = False,
    across_ranks: bool = True,
    include_matching_steps: bool = True,
    others: Sequence[AnyAnalysis] = (),
) -> dict[str, pd.DataFrame]:
    """Compute the tables of all analyses in one pass over the records, with the run's executor.

    Args:
        run: The run to analyse.
        details: Whether to add the tables that only figures use.
        across_ranks: Whether to add the tables that require matching all calls of all ranks.
        include_matching_steps: Whether `expected` and `reconciliation` have the steps without differences, too.
        others: Further analyses.

    Returns:
        The tables by name.
    """
    from .analysis_catalog import ACROSS_RANKS, ANALYSES, DETAILS
    from .compare import rules_analysis
    from .fold_engine import fold

    brief = {} if include_matching_steps else {rules_analysis.ANALYSIS.name: rules_analysis.DIFFERENCES}
    analyses = [brief.get(analysis.name, analysis) for analysis in ANALYSES]
    optional = (*(ACROSS_RANKS if across_ranks else ()), *(DETAILS.values() if details else ()))
    return fold(run, (*analyses, *optional, *others))


def detail(run: AnalysedRun, name: str) -> pd.DataFrame | None:
    """Compute a table that only figures use; return None if no such table has this name."""
    from .analysis_catalog import DETAILS
    from .fold_engine import fold

    return fold(run, [DETAILS[name]])[name] if name in DETAILS else None


def tables_to_store(run: RecordedRun) -> Iterator[tuple[str, dict[str, pd.DataFrame]]]:
    """Yield the names and tables of the analyses that `commtrace pack` stores for reports and checks.

    ACROSS_RANKS are not stored.
    """
    from . import fold_engine
    from .analysed_run import AnalysedRun
    from .analysis_catalog import ANALYSES, DETAILS

    return fold_engine.tables_to_store(AnalysedRun(run.log, run.executor), [*ANALYSES, *DETAILS.values()])
