"""Engine that runs analyses over the records of a run.

An analysis consists of three functions, as in map-reduce:

    partial(block) -> table               reduces one block of records, with numbers in place of labels
    merge(tables) -> table                combines such tables; merge([merge([a, b]), c]) == merge([a, b, c])
    finish(table, run) -> {name: table}   returns the final tables, given the merged table with labels
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import pandas as pd

from commtrace.reading.labels import TEXT_FIELDS, RunLabels
from commtrace.reading.record_columns import IDS, RecordColumns
from commtrace.reading.run_parts import RunPart, merge_tree
from commtrace.reading.stored_tables import MERGED
from commtrace.summary_format import TIMES

from .across_ranks.matching import BlockCalls, CallReader, Derived
from .analysed_run import AnalysedRun
from .grouping import Array
from .record_blocks import EMPTY_BLOCK, READ_FIELDS, ROWS_OF_BLOCK, HistogramBlock, RecordBlock, read_blocks

_CALLS_PER_TASK: Final = ROWS_OF_BLOCK * 7 // 8
"""Records of a part, all of whose calls are in memory until the table of calls has them: mostly one block."""

NamedTables: TypeAlias = dict[str, pd.DataFrame]


@dataclass(frozen=True)
class Analysis:
    """Pure, picklable functions that compute tables of a run. The module docstring defines them."""

    name: str
    partial: Callable[[RecordBlock], pd.DataFrame]
    merge: Callable[[Sequence[pd.DataFrame]], pd.DataFrame]
    finish: Callable[[pd.DataFrame, AnalysedRun], NamedTables]
    reads_records: Callable[[AnalysedRun], bool] | None = None
    """Whether the tables of a run depend on its records. None: they always do."""
    reads_cells: bool = False
    """Whether blocks may come from a summary: they have no times, and a row may stand for several calls."""
    times_partial: Callable[[HistogramBlock], pd.DataFrame] | None = None
    """Like `partial`, for histograms of durations."""
    categorical: bool = False
    """Whether `finish` receives labels as categoricals, which suit long tables."""


class NeededCalls(NamedTuple):
    """Matched calls that an analysis reads (`AnalysedRun.matched_calls`): all with columns, else those of a sample."""

    columns: tuple[str, ...] = ()
    """Columns of `match_calls`, besides those of `call_times`."""
    derived: Mapping[str, Derived] = MappingProxyType({})


class RunAnalysis(NamedTuple):
    """An analysis that is not a fold: `finish` computes its tables from the run, and from its matched calls."""

    name: str
    finish: Callable[[AnalysedRun], NamedTables]
    calls: NeededCalls | None = None


AnyAnalysis: TypeAlias = Analysis | RunAnalysis


def fold(run: AnalysedRun, analyses: Sequence[AnyAnalysis]) -> NamedTables:
    """Compute the tables of analyses with distinct names in one pass over a run's records, with its executor."""
    stored = _stored_tables(run, analyses)
    merged = merged_tables(run, [analysis for analysis in analyses if analysis.name not in stored])
    merged |= {name: tables[MERGED] for name, tables in stored.items() if MERGED in tables}

    def finished(analysis: AnyAnalysis) -> NamedTables:
        if isinstance(analysis, RunAnalysis):
            return stored.get(analysis.name) or analysis.finish(run)
        return analysis.finish(_labelled(analysis, merged.get(analysis.name), run), run)

    tables = {name: table for analysis in analyses for name, table in finished(analysis).items()}
    run.call_table = None  # which may be large
    return tables


def merged_table(run: AnalysedRun, analysis: Analysis) -> pd.DataFrame:
    """Return the merged table of an analysis, with labels, as its `finish` receives it."""
    stored = _stored_tables(run, [analysis]).get(analysis.name, {})
    merged = stored if MERGED in stored else {MERGED: merged_tables(run, [analysis]).get(analysis.name)}
    return _labelled(analysis, merged[MERGED], run)


def merge_tables(analyses: Sequence[Analysis], parts: Sequence[NamedTables]) -> NamedTables:
    """Merge the merged tables of parts of a run, whose labels have the same numbers."""
    return _merged({analysis.name: _Fold(analysis.partial, analysis.merge) for analysis in analyses}, parts)


def finished_tables(analyses: Sequence[Analysis], merged: NamedTables, run: AnalysedRun) -> NamedTables:
    """Return the final tables of analyses from their merged ones."""
    tables = (analysis.finish(_labelled(analysis, merged[analysis.name], run), run) for analysis in analyses)
    return {name: table for own in tables for name, table in own.items()}


def merged_tables(run: AnalysedRun, analyses: Sequence[AnyAnalysis], records_of_part: int | None = None) -> NamedTables:
    """Return the merged tables of the analyses that read the records of this run, with numbers in place of labels.

    Args:
        run: The run.
        analyses: The analyses.
        records_of_part: Records after whose segment a part ends (`RecordedRun.parts`): with fewer, less memory is
            needed at a time, and more time. None: the default, or a block if matched calls are needed.
    """
    folds = [analysis for analysis in analyses if isinstance(analysis, Analysis)]
    read = {fold.name: fold for fold in folds if fold.reads_records is None or fold.reads_records(run)}
    wanted = {name: _Fold(analysis.partial, analysis.merge) for name, analysis in read.items()}
    needed = [analysis.calls for analysis in analyses if isinstance(analysis, RunAnalysis) and analysis.calls]
    if needed:
        columns = {name: None for calls in needed for name in calls.columns}
        derived = {name: compute for calls in needed for name, compute in calls.derived.items()}
        run.call_table = run.new_call_table([*columns], derived)
    merged = _read(run, wanted, records_of_part) if wanted or needed else {}
    for name, tables in _summary_partials(read, run).items():
        merged[name] = wanted[name].merge([merged[name], *tables])
    return merged


def tables_to_store(run: AnalysedRun, analyses: Sequence[AnyAnalysis]) -> Iterator[tuple[str, NamedTables]]:
    """Yield, by analysis, what `fold` reads in place of a packed log's records: the merged table, or all tables."""
    merged = merged_tables(run, analyses)
    for analysis in analyses:
        if analysis.name in merged:
            yield analysis.name, {MERGED: merged.pop(analysis.name)}
        elif isinstance(analysis, RunAnalysis):
            yield analysis.name, analysis.finish(run)


def _stored_tables(run: AnalysedRun, analyses: Sequence[AnyAnalysis]) -> dict[str, NamedTables]:
    """Return the stored tables of a packed log by analysis."""
    stored = run.stored_tables
    tables = {analysis.name: stored.read(analysis.name) for analysis in analyses} if stored else {}
    return {name: by_name for name, by_name in tables.items() if by_name}


def _summary_partials(analyses: Mapping[str, Analysis], run: AnalysedRun) -> dict[str, list[pd.DataFrame]]:
    """Return the partial tables of a run's summaries, by the name of the analysis."""
    tables: dict[str, list[pd.DataFrame]] = defaultdict(list)
    for ids, process in zip(run.labels.processes, run.processes, strict=True):
        if process.summary is None:
            continue
        for calls in process.summary.calls(process.rank):
            columns = RecordColumns.of(READ_FIELDS, len(calls)).fill(calls, ids)
            block = RecordBlock(columns, run.labels, calls["calls"], calls["exact"].astype(bool))
            for name, analysis in analyses.items():
                if analysis.reads_cells:
                    tables[name].append(analysis.partial(block))
        times = process.summary.table("times")
        rows = {name: times[name] if name not in IDS else ids.run_ids(name, times[name]) for name in TIMES.names or ()}
        for name, analysis in analyses.items():
            if analysis.times_partial is not None:
                tables[name].append(analysis.times_partial(HistogramBlock(rows, run.labels)))
        for name, partials in tables.items():  # after each process, to bound memory
            tables[name] = [analyses[name].merge(partials)]
    return tables


def _read(run: AnalysedRun, folds: Mapping[str, _Fold], records_of_part: int | None) -> NamedTables:
    """Read the records once: return the merged tables of folds, and fill the run's table of calls, if it has one."""
    merge = functools.partial(_merged, folds)
    if (table := run.call_table) is None:
        parts = run.parts(min_slots=records_of_part)
        return run.executor.reduce("fold", functools.partial(_partials, folds, run.labels), merge, parts)
    read = functools.partial(_partials_and_calls, folds, table.reader, run.labels)

    def partials() -> Iterator[NamedTables]:
        for tables, blocks in run.executor.map("fold", read, run.parts(min_slots=records_of_part or _CALLS_PER_TASK)):
            while blocks:  # no variable keeps their memory while the next part is read
                table.append(blocks.pop(0))
            yield tables

    return merge_tree(merge, partials())


class _Fold(NamedTuple):
    """The functions of an analysis that run where the records are."""

    partial: Callable[[RecordBlock], pd.DataFrame]
    merge: Callable[[Sequence[pd.DataFrame]], pd.DataFrame]


def _partials(folds: Mapping[str, _Fold], labels: RunLabels, part: RunPart) -> NamedTables:
    """Return the merged partial tables of a part."""
    partials = ({name: fold.partial(block) for name, fold in folds.items()} for block in read_blocks(part, labels))
    return merge_tree(functools.partial(_merged, folds), partials)


def _partials_and_calls(
    folds: Mapping[str, _Fold], reader: CallReader, labels: RunLabels, part: RunPart
) -> tuple[NamedTables, list[BlockCalls]]:
    """Return the merged partial tables of a part, and its calls."""
    calls = []

    def partials() -> Iterator[NamedTables]:
        for block in read_blocks(part, labels, fields=reader.record_fields):
            tables = {name: fold.partial(block) for name, fold in folds.items()}
            calls.append(reader.calls(block))  # last: the partial tables need more memory than they keep
            yield tables

    tables = [*partials()]
    # The tables of a single block are merged with those of other parts.
    return tables[0] if len(tables) == 1 else merge_tree(functools.partial(_merged, folds), tables), calls


def _merged(folds: Mapping[str, _Fold], tables: Sequence[NamedTables]) -> NamedTables:
    return {name: fold.merge([by_name[name] for by_name in tables]) for name, fold in folds.items()}


def _labelled(analysis: Analysis, table: pd.DataFrame | None, run: AnalysedRun) -> pd.DataFrame:
    """Return the merged table, with labels or categoricals in place of the numbers in TEXT_FIELDS."""
    if table is None:
        table = analysis.merge([analysis.partial(EMPTY_BLOCK)])
    columns: dict[str, Any] = {}
    for name in TEXT_FIELDS:
        if name in table:
            codes: Array = table[name].to_numpy()
            labels = run.labels.distinct(name)
            if analysis.categorical:
                columns[name] = pd.Categorical.from_codes(codes, pd.Index(labels.tolist()))
            else:
                columns[name] = labels[codes]
    return table.assign(**columns)
