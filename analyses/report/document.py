"""Reports as JSON documents, for programs.

The report of one run:

    {
      "format": "commtrace-report", "version": 1,
      "run": "20261121-045421-3f9a1c",
      "path": "/data/logs/run1",
      "job": {...} or null,                    the job row of the log, as it was captured
      "other_runs": ["20261120-..."],          runs in the same directory that are not in this document
      "tables": {
        "volume_by_operation": [{"op": "all_reduce", "calls": 6, "payload_bytes": 24576, ...}, ...],
        ...
      },
      "columns": {
        "volume_by_operation": {"op": {"unit": "", "meaning": "Operation, ..."}, ...},
        ...
      }
    }

All tables of a report are present, even without rows; the tables that only figures use are not. Every row has every
column. Bytes and times are exact, in bytes and ns. null means "not known" or "not applicable". The JSON is strict: it
has no NaN and no Infinity.

The comparison of several runs side by side has the tables of `commtrace.analyses.side_by_side`, and the scaling report
those of `commtrace.analyses.scaling`; predictions have those of `commtrace.analyses.what_if`:

    {"format": "commtrace-comparison", "version": 1, "tables": {"runs": [...], ...}, "columns": {...}}
    {"format": "commtrace-scaling", "version": 1, "tables": {"scaling": [...]}, "sentences": [...], "columns": {...}}
    {"format": "commtrace-what-if", "version": 1, "run": "...", "tables": {"what_if": [...]}, "sentences": [...], ...}

The state of a run that goes on, as of its last reading (`commtrace top`), has the tables of
`commtrace.analyses.live.followed_run.LiveRun`. `problem` is why it was not read again, or null; `processes` are counts
by state; `step` is null before the first; `alarms` are sentences on processes that failed, and on hangs:

    {"format": "commtrace-live", "version": 1, "run": "...", "path": "...", "read_ns": 1795856712000000000,
     "problem": null, "is_over": false, "processes": {"runs": 4}, "step": 17, "alarms": [], "tables": {...},
     "columns": {...}}

The differences between two runs have the tables of `commtrace diff`:

    {"format": "commtrace-diff", "version": 1, "equal": true, "tables": {"call_differences": [...], ...},
     "not_compared": [...], "notes": [...], "columns": {...}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import pandas as pd

from commtrace.analyses.analysis_catalog import TABLES, describe_columns
from commtrace.analyses.compare.verdict import Verdict
from commtrace.analyses.coverage import notes_table
from commtrace.analyses.table_specs.equivalent_ranks import ALIKE, ALIKE_MEANING, Different, Distribution, reduce_ranks
from commtrace.reading.log_notes import merge_notes
from commtrace.reading.recorded_run import RecordedRun

VERSION: Final = 1


def report_to_json(run: RecordedRun, tables: Mapping[str, pd.DataFrame], *, per_rank: bool = False) -> str:
    """Return the report of one run as a JSON document; with `per_rank`, every row of every rank."""
    return _document(
        "commtrace-report",
        tables if per_rank else {**_reduced(tables), **_merged_notes(run, tables)},
        run=run.id,
        path=str(run.log.path),
        job=to_json_value(run.job),
        other_runs=list(run.log.other_runs),
    )


def comparison_to_json(tables: Mapping[str, pd.DataFrame]) -> str:
    """Return the comparison of several runs as a JSON document."""
    return _document("commtrace-comparison", tables)


def scaling_to_json(tables: Mapping[str, pd.DataFrame], sentences: Sequence[str], *, per_rank: bool = False) -> str:
    """Return the scaling report as a JSON document; with `per_rank`, every row of every rank."""
    return _document("commtrace-scaling", tables if per_rank else _reduced(tables), last={"sentences": [*sentences]})


def live_run_to_json(run: RecordedRun, tables: Mapping[str, pd.DataFrame], **state: Any) -> str:
    """Return the state of a run that goes on as a JSON document."""
    return _document("commtrace-live", tables, run=run.id, path=str(run.log.path), **state)


def what_if_to_json(run: RecordedRun, tables: Mapping[str, pd.DataFrame], sentences: Sequence[str]) -> str:
    """Return predicted step times as a JSON document."""
    return _document("commtrace-what-if", tables, last={"sentences": [*sentences]}, run=run.id, path=str(run.log.path))


def diff_to_json(verdict: Verdict, *, per_rank: bool = False) -> str:
    """Return the differences between two runs as a JSON document; with `per_rank`, every row of every rank."""
    tables = {"call_differences": verdict.table, "setting_differences": verdict.settings}
    tables = tables if per_rank else _reduced(tables)
    last = {"not_compared": [*verdict.not_compared], "notes": [*verdict.notes]}
    return _document("commtrace-diff", tables, last=last, equal=verdict.equal)


def _reduced(tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    return {name: reduce_ranks(TABLES[name], table) for name, table in tables.items()}


def _merged_notes(run: RecordedRun, tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    return {"notes": notes_table(merge_notes(run.notes))} if "notes" in tables else {}


def _document(
    format_name: str, tables: Mapping[str, pd.DataFrame], *, last: Mapping[str, Any] | None = None, **first: Any
) -> str:
    """Return a JSON document, indented, without a newline at its end."""
    head = json.dumps({"format": format_name, "version": VERSION, **first}, indent=1, allow_nan=False)
    columns: dict[str, Any] = {**describe_columns(tables)}
    for name, table in tables.items():
        if ALIKE in table:
            columns[name] = {column: columns[name].get(column, ALIKE_MEANING) for column in map(str, table)}
    tail = json.dumps({**(last or {}), "columns": columns}, indent=1, allow_nan=False)
    texts = ",\n".join(f"  {json.dumps(name)}: {_rows_to_json(table)}" for name, table in tables.items())
    return f'{head[:-2]},\n "tables": {{\n{texts}\n }},\n{tail[2:]}'


def _rows_to_json(table: pd.DataFrame) -> str:
    """Return the rows as a list of objects.

    Values are encoded column by column, because calling json.dumps for each value is slow.
    """
    if not len(table):
        return "[]"
    row = ",\n".join(f"    {json.dumps(name)}: %s" for name in table.columns)
    rows = map(f"   {{\n{row}\n   }}".__mod__, zip(*(_column_to_json(table[name]) for name in table), strict=True))
    return "[\n" + ",\n".join(rows) + "\n  ]"


def _column_to_json(column: pd.Series[Any]) -> list[str]:
    if column.dtype.kind in "iu" and not column.hasnans:
        return [*map(str, column.tolist())]
    if pd.api.types.infer_dtype(column, skipna=True) == "string":
        codes, values = pd.factorize(column)
        texts = [*map(json.dumps, values.tolist()), "null"]
        return [texts[code] for code in codes.tolist()]
    return [json.dumps(to_json_value(value), allow_nan=False) for value in column.tolist()]


def to_json_value(value: Any) -> Any:
    """Return a value in JSON's types: null if it is missing or not finite, an integer if it is a whole float."""
    if isinstance(value, Distribution | Different):
        return to_json_value(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    if value is None or value is pd.NA:
        return None
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return None if not math.isfinite(value) else int(value) if value.is_integer() else value
    return value
