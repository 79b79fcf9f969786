"""Summary of an imported process: calls that its source counts without saying when each was (`summary_format`)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Final

import numpy as np

from commtrace.durations import MEASURES
from commtrace.recording.summary_files import append_rows, table_path
from commtrace.schema import Clock
from commtrace.summary_format import CELLS, IN_FLIGHT, STEPS, SUMS, TABLES, TIMES, Rows, buckets

from .events import ImportedTotal

_TO_COMPLETION: Final = MEASURES.index("to_completion")
_CELL_FIELDS: Final = ("payload", "local", "group", "site", "kind", "phase", "state")
_MOST_TIMES: Final = 1 << 16
"""Number of different durations that are kept before they are counted in buckets."""
_LARGEST: Final = (1 << 32) - 1


class ImportedSummary:
    """Counts of calls and histograms of their durations, without steps.

    Attributes:
        calls: Number of calls so far.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._cells: Counter[tuple[int, ...]] = Counter()
        """Number of calls by _CELL_FIELDS, and whether sizes are rounded."""
        self._times: Counter[tuple[int, ...]] = Counter()
        """Number of calls by kind, measure, clock, group, site, payload and duration in ns."""
        self._histogram: dict[bytes, list[int]] = {}
        """Calls, sum and maximum of durations, and sum of payloads, by the key of a row of TIMES."""

    def add(self, total: ImportedTotal, kind: int, group: int, site: int) -> None:
        """Add calls, whose kind, group and site are given by the ids of their rows."""
        call = total.call
        payload, local = call.payload or 0, min(call.local or 0, call.payload or 0)
        key = (payload, local, group, site, kind, int(call.phase), int(call.state), int(not total.is_exact))
        self._cells[key] += total.calls
        self.calls += total.calls
        for ns in total.in_flight_ns:
            if ns > 0 and payload:
                self._times[kind, IN_FLIGHT, int(call.clock), group, site, payload, ns] += 1
        for ns in total.to_completion_ns:
            self._times[kind, _TO_COMPLETION, int(Clock.NONE), 0, site, 0, ns] += 1
        if len(self._times) > _MOST_TIMES:
            self._fold_times()

    def _fold_times(self) -> None:
        """Count the durations in the buckets of the histogram."""
        if not self._times:
            return
        columns = np.array([*self._times], np.int64).T
        calls = np.array([*self._times.values()], np.int64)
        kind, measure, clock, group, site, payload, ns = columns
        rows = np.zeros(len(calls), TIMES)
        for name, values in {"kind": kind, "measure": measure, "clock": clock, "group": group, "site": site}.items():
            rows[name] = values
        rows["bucket"] = np.where(measure == IN_FLIGHT, 0, buckets(ns))
        width = TIMES.fields["until"][1] if TIMES.fields is not None else 0  # the key is what comes before
        sums = zip(rows, calls.tolist(), (calls * ns).tolist(), ns.tolist(), (calls * payload).tolist(), strict=True)
        for row, count, total, longest, size in sums:
            values = self._histogram.setdefault(row.tobytes()[:width], [0, 0, 0, 0])
            values[:] = values[0] + count, values[1] + total, max(values[2], longest), values[3] + size
        self._times.clear()

    def write(self, folder: Path, stem: str) -> None:
        """Write the tables of a process. Raises OSError."""
        self._fold_times()
        steps = np.array([(1, -1, -1, 1, 0)], STEPS)
        for name, rows in {"cells": self._cell_rows(), "steps": steps, "times": self._time_rows()}.items():
            append_rows(table_path(folder, stem, name), TABLES[name], 0, rows.tobytes())

    def _cell_rows(self) -> Rows:
        rows = np.zeros(len(self._cells), CELLS)
        rows["pattern"] = 1
        for row, (key, calls) in zip(rows, self._cells.items(), strict=True):
            *fields, is_rounded = key
            for name, value in zip(_CELL_FIELDS, fields, strict=True):
                row[name] = value
            row["calls"] = min(calls, _LARGEST)
            if is_rounded:
                row["bits"] = SUMS
                row["payload"], row["local"] = row["payload"] * int(row["calls"]), row["local"] * int(row["calls"])
        return rows

    def _time_rows(self) -> Rows:
        rows = np.zeros(len(self._histogram), TIMES)
        for at, (key, values) in enumerate(self._histogram.items()):
            row: Any = np.frombuffer(key.ljust(TIMES.itemsize, b"\0"), TIMES)[0].copy()
            row["until"] = -1
            row["calls"], row["ns"], row["max_ns"], row["payload"] = (min(values[0], _LARGEST), *values[1:])
            rows[at] = row
        return rows
