"""The event table: one row per call, with the columns of `schema.EVENT_COLUMNS`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from commtrace.schema import EVENT_COLUMNS, RECORD, Records

from .labels import LABEL_COLUMNS, UNKNOWN, RecordLabels
from .log import Process
from .table_reader import ProcessTables

# Columns that are copied from a field of the record. rank, group_size and wire_bytes are computed.
_COPIED_COLUMNS: Final = {
    "payload_bytes": "payload",
    **{f"{name}_ns": name for name in ("t_begin", "t_return", "t_wait", "t_start", "t_end")},
    **{name: name for name in ("peer", "tag", "seq", "step", "micro_batch")},
}


class EventTable:
    """Converter from records to event table. Labels are categoricals with the same categories in the whole run."""

    def __init__(self, all_labels: Sequence[RecordLabels]) -> None:
        self._categories = {
            column: pd.Index(
                sorted({UNKNOWN, "", *chain.from_iterable(labels.categories(column) for labels in all_labels)})
            )
            for column in LABEL_COLUMNS
        }

    def frame(self, records: Records, labels: RecordLabels) -> pd.DataFrame:
        """Return one row per record, in the order of the records."""
        sizes = labels.group_sizes(records["group"])
        columns: dict[str, Any] = {name: records[field] for name, field in _COPIED_COLUMNS.items()}
        columns["rank"] = np.full(len(records), labels.rank, np.int32)
        columns["group_size"] = pd.Series(sizes, dtype="Int32").mask(sizes == 0)
        columns["wire_bytes"] = labels.wire_bytes(records)
        for column, field in LABEL_COLUMNS.items():
            codes = self._categories[column].get_indexer(pd.Index(labels.categories(column).tolist()))
            columns[column] = pd.Categorical.from_codes(
                codes[labels.index(field, labels.ids(column, records))], self._categories[column]
            )
        return pd.DataFrame({name: columns[name] for name in EVENT_COLUMNS})

    def empty(self) -> pd.DataFrame:
        """Return a table without rows, with all columns and their types."""
        process = Process(Path(), -1, -1, "", ProcessTables(), ())
        return self.frame(np.zeros(0, RECORD), RecordLabels(-1, process, {}, {}))
