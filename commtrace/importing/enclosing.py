"""Spans of time that nest, such as the calls on a thread's stack, and unions of spans."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

_BLOCK: Final = 64


class NestedSpans:
    """Spans with a number each, and a search for those that enclose a moment."""

    def __init__(
        self, begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]
    ) -> None:
        order = np.lexsort((-ends, begins))
        self._begins, self._ends, self._numbers = begins[order], ends[order], numbers[order]
        padded = np.full(-(-len(order) // _BLOCK) * _BLOCK, np.iinfo(np.int64).min)
        padded[: len(order)] = self._ends
        self._latest_end = padded.reshape(-1, _BLOCK).max(axis=1) if len(order) else padded

    def at(self, moment: int) -> list[int]:
        """Return the numbers of the spans that enclose a moment, the outermost first."""
        stop = int(np.searchsorted(self._begins, moment, side="right"))
        found: list[int] = []
        for block in np.flatnonzero(self._latest_end[: -(-stop // _BLOCK)] > moment).tolist():
            part = slice(block * _BLOCK, min(stop, (block + 1) * _BLOCK))
            found += self._numbers[part][self._ends[part] > moment].tolist()
        return found


def union(begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the union of spans: begins and ends, shape (n, 2), ascending and disjoint."""
    used = ends > begins
    begins, ends = begins[used], ends[used]
    order = np.argsort(begins, kind="stable")
    begins, latest = begins[order], np.maximum.accumulate(ends[order])
    starts = np.flatnonzero(np.concatenate([np.ones(min(1, len(begins)), bool), begins[1:] > latest[:-1]]))
    stops = np.append(starts[1:], len(begins)) - 1
    return np.stack([begins[starts], latest[stops]], axis=1) if len(begins) else np.zeros((0, 2), np.int64)
