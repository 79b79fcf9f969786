"""Summary: finished records as cells in place of events (COMMTRACE_MODE=summary), in a bounded number of bytes.

Training is repetitive. The calls of a step form a *pattern* of cells; successive steps with the same pattern share one
row, however many they are. A step with a new pattern needs rows for its cells. They must fit into an allowance, which
grows evenly, within COMMTRACE_SUMMARY_BYTES a day, so that a run of weeks is described to its end. If they do not fit,
the step is mixed with others until the allowance suffices: only the sums of mixed steps are known. Counts and sums of
bytes are always exact.

Only the drain thread uses this module, which reads no clock: the caller passes times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from commtrace.durations import MEASURES, durations, flight_times
from commtrace.schema import Flag, Records
from commtrace.summary_format import (
    CELL_KEY,
    CELLS,
    IN_FLIGHT,
    STEPS,
    SUMS,
    TABLES,
    TIMES,
    TIMES_KEY,
    TO_SELF,
    Rows,
    buckets,
    size_class,
)

DAY_SECONDS: Final = 86_400
MAX_CELLS: Final = 1024
"""Cells of a step or of mixed steps beyond which sizes, and then call sites, are no longer distinguished."""
MERGED_TIMES: Final = 1 << 14
"""Number of new histogram rows at which they are merged."""
MAX_TIMES: Final = 4096
"""Histogram rows in memory beyond which call sites, and then groups, are no longer distinguished."""
PART_SECONDS: Final = 60
"""Age at which a step that has not ended is written, with its calls so far."""
_MAX_PATTERNS: Final = 512
"""Number of patterns, the newest ones, that are recognized in later steps."""
# Shares of the bytes of a day: the most that may be written at once, and what the allowance grows by. The rest remains
# for the end of the process.
_AT_ONCE, _GROWTH = 0.1, 0.8

_Numbers = tuple[int, int, int]
"""Number of calls; with SUMS also the sums of their `payload` and `local`, else 0."""
_Cells = dict[bytes, _Numbers]
"""Cells by CELL_KEY. With SUMS, `payload` of the key is the power of two, and `local` 0."""


class Summary:
    """The calls of one process that are not written yet, and the rows to write.

    Attributes:
        rows: Rows to write, by table. The caller writes and removes them.
        calls: Number of calls so far.
        last_step: The last step that has a call.
    """

    def __init__(self, rank: int, bytes_per_day: int, now: float) -> None:
        """Begin an empty summary; `now` is the time in seconds, on the clock that `flush` uses too."""
        self.rows: dict[str, list[bytes]] = {name: [] for name in TABLES}
        self.calls = 0
        self._rank = rank
        self._at_once = self._allowance = bytes_per_day * _AT_ONCE
        self._per_second = bytes_per_day * _GROWTH / DAY_SECONDS
        self._now = now
        self._max_cells = max(16, min(MAX_CELLS, int(bytes_per_day * 0.02) // CELLS.itemsize))
        self._max_times = max(64, min(MAX_TIMES, int(bytes_per_day * 0.03) // TIMES.itemsize))
        self._open: dict[int, _Cells] = {}
        """Steps whose calls may not all be finished."""
        self._opened: dict[int, float] = {}
        self._patterns: dict[frozenset[tuple[bytes, _Numbers]], int] = {}
        self._last_pattern = 0
        self._run: list[int] | None = None
        """Row of STEPS that the next step may extend: pattern, first, last, steps, 0."""
        self._mixed: _Cells = {}
        self._mixed_steps = [0, 0, 0]
        """First, last and number of the mixed steps."""
        self._times = np.zeros(0, TIMES)
        self._new_times: list[Rows] = []
        """Further rows of TIMES, one for each call."""
        self._new_times_count = 0
        self._times_by = ["kind", "group", "site"]
        self.last_step = -1

    # ---- calls -----------------------------------------------------------------------------------------------------

    def add(self, records: Records) -> None:
        """Add finished records, in any order."""
        if not len(records):
            return
        self.calls += len(records)
        self.last_step = max(self.last_step, int(records["step"].max()))
        keys = np.zeros(len(records), _STEP_KEY)
        for name in ("step", "payload", "local", "group", "site", "kind", "phase", "state"):
            keys[name] = records[name]
        keys["bits"] = np.where(records["peer"] == self._rank, TO_SELF, 0)
        first, groups = _group(keys, keys.itemsize)
        steps, calls = keys["step"][first].tolist(), np.bincount(groups).tolist()
        for key, step, number in zip(_packed(keys[first]), steps, calls, strict=True):
            if step not in self._open:
                self._open[step], self._opened[step] = {}, self._now
            cells = self._open[step]
            _add(cells, key[: CELL_KEY.itemsize], (number, 0, 0))
            if len(cells) > self._max_cells:
                _coarsen(cells, self._max_cells)
        self._add_times(records)

    def _add_times(self, records: Records) -> None:
        not_batched = (records["batch"] == 0) & ((records["flags"] & int(Flag.COALESCED)) == 0)
        flights = flight_times(records)
        used = not_batched & (flights > 0) & (records["payload"] > 0)
        times = [*(durations(name, records) for name in MEASURES), flights[used]]
        ns = np.concatenate(times)
        rows = np.zeros(len(ns), TIMES)
        rows["measure"] = np.repeat(np.arange(len(times)), [len(part) for part in times])
        is_flight = rows["measure"] == IN_FLIGHT
        for name in self._times_by:
            rows[name] = np.concatenate([records[name]] * len(MEASURES) + [records[name][used]])
        for name in ("clock", "group"):  # bandwidth needs the size of the group
            rows[name][is_flight] = records[name][used]
        rows["bucket"] = np.where(is_flight, 0, buckets(ns))
        rows["calls"] = 1
        rows["ns"] = rows["max_ns"] = np.maximum(ns, 0)
        rows["payload"][is_flight] = records["payload"][used]
        self._new_times.append(rows)
        self._new_times_count += len(rows)
        if self._new_times_count >= MERGED_TIMES:
            self._merge_times()

    def _merge_times(self) -> None:
        self._times = _merge([self._times, *self._new_times])
        self._new_times, self._new_times_count = [], 0
        while len(self._times) > self._max_times and len(self._times_by) > 1:
            column = self._times_by.pop()
            self._times[column][(self._times["measure"] != IN_FLIGHT) | (column == "site")] = 0
            self._times = _merge([self._times])

    # ---- steps -----------------------------------------------------------------------------------------------------

    def close_steps(self, first_open: int) -> None:
        """Close the steps before `first_open`. If one gets more calls, they are another part of it."""
        for step in sorted(step for step in self._open if step < first_open):
            self._close(step)

    def _close(self, step: int) -> None:
        cells = self._open.pop(step)
        del self._opened[step]
        content = frozenset(cells.items())
        pattern = self._patterns.get(content)
        if pattern is not None and self._run is not None and self._run[0] == pattern and self._run[2] == step - 1:
            self._run[2] = step
            self._run[3] += 1
            return
        cost = STEPS.itemsize + (len(cells) * CELLS.itemsize if pattern is None else 0)
        if cost > self._allowance:
            self._mix(step, cells)
            return
        self._allowance -= cost
        self._end_run()
        if pattern is None:
            pattern = self._patterns[content] = self._new_pattern(cells)
            if len(self._patterns) > _MAX_PATTERNS:
                del self._patterns[next(iter(self._patterns))]
        self._run = [pattern, step, step, 1, 0]

    def _new_pattern(self, cells: Mapping[bytes, _Numbers]) -> int:
        self._last_pattern += 1
        rows = np.zeros(len(cells), CELLS)
        rows["pattern"] = self._last_pattern
        keys = np.frombuffer(b"".join(cells), CELL_KEY)
        for name in CELL_KEY.names or ():
            rows[name] = keys[name]
        rows["calls"], payload, local = np.array([*cells.values()], np.int64).reshape(-1, 3).T
        is_sum = (keys["bits"] & SUMS) > 0
        rows["payload"][is_sum], rows["local"][is_sum] = payload[is_sum], local[is_sum]
        self.rows["cells"].append(rows.tobytes())
        return self._last_pattern

    def _end_run(self) -> None:
        if self._run is not None:
            self._add_steps(*self._run)
            self._run = None

    def _add_steps(self, *row: int) -> None:
        self.rows["steps"].append(np.array([row], STEPS).tobytes())

    def _mix(self, step: int, cells: _Cells) -> None:
        first, last, steps = self._mixed_steps
        self._mixed_steps = [min(first, step), max(last, step), steps + 1] if steps else [step, step, 1]
        for key, numbers in cells.items():
            _add(self._mixed, key, numbers)
        if len(self._mixed) > self._max_cells:
            _coarsen(self._mixed, self._max_cells)

    def _end_mixed(self) -> None:
        if self._mixed:
            self._add_steps(self._new_pattern(self._mixed), *self._mixed_steps, 1)
            self._mixed, self._mixed_steps = {}, [0, 0, 0]

    # ---- bytes -----------------------------------------------------------------------------------------------------

    def flush(self, now: float) -> None:
        """Move to `rows` what the allowance covers."""
        self._allowance = min(self._at_once, self._allowance + (now - self._now) * self._per_second)
        self._now = now
        if self._run is not None and STEPS.itemsize <= self._allowance:
            self._allowance -= STEPS.itemsize  # for the row that its next step begins
            self._end_run()
        cost = STEPS.itemsize + len(self._mixed) * CELLS.itemsize
        if self._mixed and cost <= self._allowance:
            self._allowance -= cost
            self._end_mixed()
        # What can wait is written only if enough is left for new patterns.
        for step in [step for step, since in self._opened.items() if now - since >= PART_SECONDS]:
            if len(self._open[step]) * CELLS.itemsize <= self._allowance - self._at_once / 2:
                self._close(step)
        self._merge_times()
        cost = len(self._times) * TIMES.itemsize
        if len(self._times) and cost <= self._allowance - self._at_once / 2:
            self._allowance -= cost
            self._end_times()

    def forget_patterns(self) -> None:
        """Start again without the patterns that were written, because their file was removed."""
        self._end_run()
        self._patterns.clear()

    def finish(self) -> None:
        """Move everything to `rows`."""
        self.close_steps(np.iinfo(np.int32).max)
        self._end_run()
        self._end_mixed()
        self._end_times()

    def _end_times(self) -> None:
        self._merge_times()
        self._times["until"] = self.last_step
        self.rows["times"].append(self._times.tobytes())
        self._times = self._times[:0]

    def rows_if_finished(self) -> dict[str, bytes]:
        """Return what `rows` would be if the process ended now, by table."""
        copy = Summary.__new__(Summary)
        copy.__dict__.update(self.__dict__)
        copy.rows = {name: [*rows] for name, rows in self.rows.items()}
        copy._open, copy._opened, copy._patterns = {**self._open}, {**self._opened}, {**self._patterns}
        copy._times_by = [*self._times_by]
        copy._mixed, copy._run = {**self._mixed}, self._run and [*self._run]
        copy.finish()
        return {name: b"".join(rows) for name, rows in copy.rows.items()}


_STEP_KEY: Final = np.dtype([*CELL_KEY.descr, ("step", "<i4"), ("unused", "<i4")])
_HASH_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)


def _group(rows: Rows, size: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Group rows whose first `size` bytes are equal.

    Returns:
        The index of one row of each group, and the number of each row's group, shape (n,).
    """
    keys = np.ascontiguousarray(rows.view(np.uint8).reshape(len(rows), rows.itemsize)[:, :size])
    words = keys.view(np.uint64)
    hashes = np.zeros(len(rows), np.uint64)
    for word in words.T:  # sorting one number is much faster than sorting keys
        hashes = (hashes ^ (hashes >> np.uint64(29)) ^ word) * _HASH_FACTOR
    _, first, groups = np.unique(hashes, return_index=True, return_inverse=True)
    if (words[first][groups] != words).any():  # two keys with one hash
        _, first, groups = np.unique(keys.view(f"S{size}").ravel(), return_index=True, return_inverse=True)
    return first, groups


def _merge(tables: Sequence[Rows]) -> Rows:
    """Return tables of TIMES as one, with one row for each key."""
    rows = np.concatenate(tables)
    first, groups = _group(rows, TIMES_KEY.itemsize)
    merged = rows[first]
    for name in ("calls", "ns", "payload"):
        sums = np.zeros(len(first), np.int64)
        np.add.at(sums, groups, rows[name])
        merged[name] = sums
    np.maximum.at(merged["max_ns"], groups, rows["max_ns"])
    return merged


def _add(cells: _Cells, key: bytes, numbers: _Numbers) -> None:
    calls, payload, local = cells.get(key, (0, 0, 0))
    cells[key] = calls + numbers[0], payload + numbers[1], local + numbers[2]


def _coarsen(cells: _Cells, limit: int) -> None:
    """Merge cells with payloads within a power of two and, if there are still too many, those of all call sites."""
    for merge_sites in (False, True):
        keys, numbers = np.frombuffer(b"".join(cells), CELL_KEY).copy(), [*cells.values()]
        sizes = [*zip(keys["payload"].tolist(), keys["local"].tolist(), (keys["bits"] & SUMS).tolist(), strict=True)]
        keys["payload"], keys["local"] = [size_class(payload) for payload, _, _ in sizes], 0
        keys["bits"] |= SUMS
        if merge_sites:
            keys["site"] = 0
        cells.clear()
        for key, (payload, local, is_sum), before in zip(_packed(keys), sizes, numbers, strict=True):
            _add(cells, key, before if is_sum else (before[0], before[0] * payload, before[0] * local))
        if len(cells) <= limit // 2:
            return


def _packed(keys: Rows) -> list[bytes]:
    """Return the bytes of each key."""
    size = keys.itemsize
    data = keys.tobytes()
    return [data[at : at + size] for at in range(0, len(data), size)]
