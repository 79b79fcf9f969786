"""Measured calls of a log by rank and step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np
import pandas as pd

from commtrace.analyses.fold_engine import RecordBlock, merge_sums, rows_of, sums_by

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
        "process": np.full(len(rows), labels.number, np.int64),
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


def calls_by_step(table: pd.DataFrame) -> dict[int, list[EqualCalls]]:
    """Return the measured calls of one process by step, from its rows of the merged table."""
    by_step: dict[int, list[EqualCalls]] = defaultdict(list)
    for row in rows_of(table):
        wire = Fraction(int(row.wire_parts), int(row.ranks)) if row.ranks and not row.wire_unknown else None
        counts = int(row.payload), int(row.calls), int(row.payload_bytes)
        names = str(row.phase), str(row.site)
        by_step[int(row.step)].append(EqualCalls(str(row.role), str(row.op), *counts, wire, *names, int(row.ranks)))
    return by_step
