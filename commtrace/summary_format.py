"""Format of summaries: the files of a process that records with COMMTRACE_MODE=summary.

Three tables of fixed-size records, each an `.npy` file next to the process's tables (`docs/reference/log-format.md`):

    rank00003-4711-cells.npy    CELLS: the calls of a pattern, a row for each set of equal calls
    rank00003-4711-steps.npy    STEPS: which steps made the calls of which pattern
    rank00003-4711-times.npy    TIMES: histograms of durations

A step may be in several rows of STEPS, because its calls may be written in several parts; the rows add up.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from commtrace.durations import MEASURES

Rows = npt.NDArray[np.void]

CELL_KEY: Final = np.dtype(
    [
        ("payload", "<i8"),  # as in a record; with SUMS, the sum over the calls
        ("local", "<i8"),  # likewise
        ("group", "<u4"),
        ("site", "<u4"),
        ("kind", "<u2"),
        ("phase", "u1"),
        ("state", "u1"),
        ("bits", "<u4"),  # TO_SELF, SUMS
    ]
)
CELLS: Final = np.dtype([("pattern", "<u4"), ("calls", "<u4"), *((name, CELL_KEY[name]) for name in CELL_KEY.names)])  # type: ignore[union-attr]
STEPS: Final = np.dtype(
    [
        ("pattern", "<u4"),
        ("first", "<i4"),  # step
        ("last", "<i4"),  # step
        ("steps", "<u4"),  # number of steps
        ("mixed", "<u4"),  # 0: each of the steps made the calls of the pattern; 1: all of them together did
    ]
)
TIMES_KEY: Final = np.dtype(
    [
        ("kind", "<u2"),
        ("measure", "u1"),  # index into `durations.MEASURES`, or IN_FLIGHT
        ("clock", "u1"),  # for IN_FLIGHT, else 0
        ("group", "<u4"),
        ("site", "<u4"),
        ("bucket", "<i4"),  # from `buckets`; 0 for IN_FLIGHT
    ]
)
TIMES: Final = np.dtype(
    [
        *((name, TIMES_KEY[name]) for name in TIMES_KEY.names),  # type: ignore[union-attr]
        ("until", "<i4"),  # the last step when the row was written
        ("calls", "<u4"),
        ("ns", "<i8"),  # sum
        ("max_ns", "<i8"),
        ("payload", "<i8"),  # sum for IN_FLIGHT, else 0
    ]
)
TABLES: Final = {"cells": CELLS, "steps": STEPS, "times": TIMES}

TO_SELF: Final = 1
"""Bit of a cell: the rank itself is the peer or root of its calls."""
SUMS: Final = 2
"""Bit of a cell: payloads of its calls differ within one power of two; `payload` and `local` are sums."""
IN_FLIGHT: Final = len(MEASURES)
"""Measure of `durations.flight_times`, for calls that have a payload and are in no batch."""
UNKNOWN_BUCKET: Final = -2
ZERO_BUCKET: Final = -1

RELATIVE_ERROR: Final = 0.05
"""Maximum relative error of a quantile that is read from a histogram."""
_GAMMA: Final = 1.04
"""Ratio of a bucket's bounds: less than 1 + RELATIVE_ERROR, because readers bin bucket means again (1/128)."""


def buckets(ns: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Return the bucket of each duration, shape (n,): from _GAMMA ** bucket, below _GAMMA ** (bucket + 1)."""
    result: npt.NDArray[np.int32] = np.floor(np.log(np.maximum(ns, 1)) / math.log(_GAMMA)).astype(np.int32)
    result[ns == 0] = ZERO_BUCKET
    result[ns < 0] = UNKNOWN_BUCKET
    return result


def size_class(payload: int) -> int:
    """Return the power of two at or below a size; 0 for 0."""
    return 1 << payload.bit_length() - 1 if payload > 0 else 0
