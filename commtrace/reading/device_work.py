"""Other work on the device of a process: when kernels computed, when memory was copied, and when steps ran.

Only imported logs have it. The file `rank*-device.npy` is an array of WORK, sorted by kind and begin.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

WORK: Final = np.dtype([("begin", "<i8"), ("end", "<i8"), ("kind", "<i4"), ("step", "<i4")])
"""A span in ns of the clock of the process's records. `step` is -1 unless the span is a step."""


class Work(IntEnum):
    """What a span is."""

    COMPUTATION = 1
    COPY = 2
    STEP = 3


def make_work(spans: npt.NDArray[np.int64], kind: Work, steps: npt.NDArray[np.int64] | int = -1) -> npt.NDArray[Any]:
    """Return rows of WORK for spans of shape (n, 2)."""
    rows = np.zeros(len(spans), WORK)
    rows["begin"], rows["end"], rows["kind"], rows["step"] = spans[:, 0], spans[:, 1], kind, steps
    return rows


def write_work(path: Path, rows: npt.NDArray[Any]) -> None:
    """Write rows of WORK. Raises OSError."""
    np.save(path, rows[np.lexsort((rows["begin"], rows["kind"]))])


def read_work(path: Path) -> npt.NDArray[Any]:
    """Return the rows of a file, shape (n,); none if it cannot be read."""
    try:
        rows = np.load(path)
    except (OSError, ValueError, EOFError):
        return np.zeros(0, WORK)
    return rows if rows.dtype == WORK and rows.ndim == 1 else np.zeros(0, WORK)


def spans_of(rows: npt.NDArray[Any], kind: Work) -> npt.NDArray[np.int64]:
    """Return the spans of a kind, int64, shape (n, 2), ascending."""
    chosen = rows[rows["kind"] == kind]
    return np.stack([chosen["begin"], chosen["end"]], axis=1)
