"""Kept records: the last calls of a process, whatever their step, for what a hung or killed job was doing.

Where the log does not get all records, the ring holds the last ones besides (`Ring.keep`). They become a file of their
own, `rank00003-4711-kept.npy`, which repeats records that the log has: only the examination of stuck calls reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from commtrace.rank_ranges import select_steps
from commtrace.schema import Records, State

from .segment_writer import write_segment

KEPT_AT_EXIT: Final = 1024
"""Records that are kept of a process that ended in order: ranks may still wait for it."""


def not_selected(records: Records, selection: Sequence[range]) -> npt.NDArray[np.bool_]:
    """Return whether each record is of a step that a selection leaves out, bool, shape (n,); an empty one: none."""
    left_out: npt.NDArray[np.bool_] = np.zeros(len(records), bool)
    return ~select_steps(records["step"], selection) if selection else left_out


def in_flight(records: Records) -> npt.NDArray[np.bool_]:
    """Return whether the end of each call was not yet observed, bool, shape (n,)."""
    return np.asarray(records["state"] < State.COMPLETE)


def records_of_a_hang(kept: Records) -> Records:
    """Return what to write of the records kept when the process ends: all if a call failed or was in flight."""
    in_order = np.isin(kept["state"], (State.COMPLETE, State.UNOBSERVABLE)).all()
    return kept[-KEPT_AT_EXIT:] if in_order else kept


def write_kept(folder: Path, stem: str, kept: Records, number: int = 0) -> None:
    """Write the records kept by a process, over those that were written before with this number. Raises OSError."""
    if not len(kept):
        return
    path = folder / (f"{stem}-kept-{number}.npy" if number else f"{stem}-kept.npy")
    path.with_name(path.name + ".open").unlink(missing_ok=True)  # of a failed attempt
    write_segment(path, kept)
