"""The normal form: one row per call, the columns of schema.NORMAL_FORM."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from commtrace.schema import EVENT_COLUMNS, RECORD, Records

from .log import Process
from .names import UNKNOWN, WORDS, Names
from .table_reader import ProcessTables

# The other columns, as they are in a record. rank, group_size and wire_bytes are computed.
_NUMBERS: Final = {
    "payload_bytes": "payload",
    **{f"{name}_ns": name for name in ("t_begin", "t_return", "t_wait", "t_start", "t_end")},
    **{name: name for name in ("peer", "tag", "seq", "step", "micro_batch")},
}


class EventTable:
    """Turns records into rows of the normal form. Words are categoricals, with the same categories in the whole run."""

    def __init__(self, everyone: Sequence[Names]) -> None:
        words = {
            column: {UNKNOWN, "", *chain.from_iterable(names.words(column) for names in everyone)} for column in WORDS
        }
        self._categories = {column: pd.Index(sorted(words[column])) for column in WORDS}

    def frame(self, records: Records, names: Names) -> pd.DataFrame:
        """One row per record, in the order of the records."""
        sizes = names.group_sizes(records["group"])
        columns: dict[str, Any] = {name: records[field] for name, field in _NUMBERS.items()}
        columns["rank"] = np.full(len(records), names.rank, np.int32)
        columns["group_size"] = pd.Series(sizes, dtype="Int32").mask(sizes == 0)
        columns["wire_bytes"] = names.wire_bytes(records)
        for column, field in WORDS.items():
            codes = self._categories[column].get_indexer(pd.Index(names.words(column).tolist()))
            columns[column] = pd.Categorical.from_codes(
                codes[names.index(field, names.numbers(column, records))], self._categories[column]
            )
        return pd.DataFrame({name: columns[name] for name in EVENT_COLUMNS})

    def empty(self) -> pd.DataFrame:
        """No rows, and the columns with their types."""
        nobody = Process(Path(), -1, -1, "", ProcessTables(), ())
        return self.frame(np.zeros(0, RECORD), Names(-1, nobody, {}, {}))
