"""Measured calls of a log by rank and step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Any, Final

import numpy as np
import pandas as pd

from commtrace.analyses.fold_engine import (
    Array,
    RecordBlock,
    concatenated_ranges,
    group_rows,
    merge_sums,
    number_sequences,
    rows_of,
    sums_by,
)

DETAILED_STEPS: Final = 64
"""Steps whose message sizes are kept apart, so that a log of many steps stays a small table; later ones have -1."""

KEYS: Final = ("process", "step", "role", "op", "phase", "site", "payload", "ranks")


@dataclass(frozen=True)
class EqualCalls:
    """Calls of one step of one rank that are equal in all fields.

    Leftovers of a comparison are calls that were recorded but not expected, or, with `calls`, `bytes` and `wire` below
    0, expected but not recorded.
    """

    role: str
    op: str
    payload: int  # of one call in bytes, -1: not kept
    calls: int
    bytes: int
    wire: Fraction | None
    phase: str = ""
    site: str = ""
    ranks: int = 0  # size of their group


def partial(block: RecordBlock) -> pd.DataFrame:
    """Return KEYS, `calls`, `payload_bytes`, `wire_parts` (wire bytes times `ranks`) and `wire_unknown`.

    `ranks` is the size of the call's group. Wire bytes are multiples of 1/`ranks` byte: sums of `wire_parts` are exact.
    """
    rows, labels = block.distinct, block.labels
    ranks = labels.group_sizes(rows["group"])
    wire, unknown = rows.volumes["wire_bytes"], rows.volumes["wire_unknown"]
    keys = {
        "process": rows["process"],
        "step": rows["step"],
        **{name: labels.ids(name, rows) for name in ("role", "op", "phase", "site")},
        "payload": np.where(rows["step"] < DETAILED_STEPS, rows["payload"], -1),
        "ranks": ranks,
    }
    values = {
        "calls": rows.calls,
        "payload_bytes": rows.volumes["payload_bytes"],
        "wire_parts": np.rint(np.where(unknown == 0, wire * ranks, 0)).astype(np.int64),
        "wire_unknown": unknown,
    }
    return sums_by(labels, keys, values)


merge = merge_sums(*KEYS)


@dataclass(frozen=True)
class MeasuredSteps:
    """The measured calls of the steps of all processes. Steps with equal calls share them.

    Attributes:
        first: Position of the first step of each process, and of the end, int64, shape (processes + 1,).
        step: Number of each step, int64, shape (steps,), ascending within a process.
        content: Position in `calls` of the calls of each step, int64, shape (steps,).
        calls: The calls of a step, all of them different.
        payload_bytes: Payload of all calls of each process, int64, shape (processes,).
    """

    first: Array
    step: Array
    content: Array
    calls: Sequence[Sequence[EqualCalls]]
    payload_bytes: Array

    def of(self, process: int) -> tuple[Array, Array]:
        """Return the steps of a process, and the position of their calls in `calls`."""
        own = slice(self.first[process], self.first[process + 1])
        return self.step[own], self.content[own]


def measured_steps(table: pd.DataFrame, processes: int) -> MeasuredSteps:
    """Return the measured calls by process and step, from the merged table of a run with so many processes."""
    process, step = (table[name].to_numpy(np.int64) for name in ("process", "step"))
    is_first = np.ones(len(table), bool)
    is_first[1:] = (np.diff(process) != 0) | (np.diff(step) != 0)
    begins = np.flatnonzero(is_first)
    rows = table.drop(columns=["process", "step"])
    _, equal = group_rows([pd.factorize(rows[name])[0] for name in rows.columns])
    content, examples = number_sequences(equal, begins)
    ends = np.append(begins[1:], len(table))
    lengths = (ends - begins)[examples]
    distinct = iter([*map(_equal_calls, rows_of(rows.iloc[concatenated_ranges(begins[examples], lengths)]))])
    payload_bytes = np.zeros(processes, np.int64)
    np.add.at(payload_bytes, process, table["payload_bytes"].to_numpy(np.int64))
    return MeasuredSteps(
        np.searchsorted(process[begins], np.arange(processes + 1)),
        step[begins],
        content,
        [[*islice(distinct, length)] for length in lengths.tolist()],
        payload_bytes,
    )


def _equal_calls(row: Any) -> EqualCalls:
    wire = Fraction(int(row.wire_parts), int(row.ranks)) if row.ranks and not row.wire_unknown else None
    counts = int(row.payload), int(row.calls), int(row.payload_bytes)
    return EqualCalls(str(row.role), str(row.op), *counts, wire, str(row.phase), str(row.site), int(row.ranks))
