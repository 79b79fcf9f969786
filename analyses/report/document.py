"""The report as one JSON document, for programs.

    {
      "format": "commtrace-report", "version": 1,
      "run": "20261121-045421-3f9a1c",
      "path": "/data/logs/run1",
      "job": {...} or null,                    the job row of the log, as it was captured
      "other_runs": ["20261120-..."],          runs in the same directory that are not in this document
      "tables": {
        "volume_by_operation": [{"op": "all_reduce", "calls": 6, "payload_bytes": 24576, ...}, ...],
        ...
      }
    }

Every table is there, also an empty one, with the columns that the module of its analysis documents; a row has every
column. Bytes and times are exact, in bytes and ns. null: not known. Strict JSON: no NaN, no Infinity.

Of several runs, with the tables of `commtrace.analyses.comparison`:

    {"format": "commtrace-comparison", "version": 1, "tables": {"runs": [{"run": "zero1", ...}, ...], ...}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pandas as pd

from commtrace.reading.run import RecordedRun

VERSION: Final = 1


def to_json(run: RecordedRun, tables: Mapping[str, pd.DataFrame]) -> str:
    """The document, indented, without a newline at its end."""
    document = {
        "format": "commtrace-report",
        "version": VERSION,
        "run": run.id,
        "path": str(run.log.path),
        "job": plain(run.job),
        "other_runs": list(run.log.other_runs),
        "tables": _rows(tables),
    }
    return json.dumps(document, indent=1, allow_nan=False)


def comparison_to_json(tables: Mapping[str, pd.DataFrame]) -> str:
    """The document of runs side by side."""
    document = {"format": "commtrace-comparison", "version": VERSION, "tables": _rows(tables)}
    return json.dumps(document, indent=1, allow_nan=False)


def _rows(tables: Mapping[str, pd.DataFrame]) -> dict[str, list[Any]]:
    return {name: [plain(row) for row in table.to_dict("records")] for name, table in tables.items()}


def plain(value: Any) -> Any:
    """The value in JSON's own types: what is missing or not finite is None, a whole float is a whole number."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if value is None or value is pd.NA:
        return None
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return None if not math.isfinite(value) else int(value) if value.is_integer() else value
    return value
