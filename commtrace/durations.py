"""Durations of recorded calls, from the times in their records.

The measures of `MEASURES`: "in_call" is t_return - t_begin, "waiting" t_end - t_wait (0 if a callback observed the
end before the wait), "to_completion" t_end - t_begin. Calls captured into a device graph and calls of dry runs have no
times of their own, so their durations are unknown.
"""

from __future__ import annotations

from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from commtrace.schema import Clock, Flag

MEASURES: Final = ("in_call", "waiting", "to_completion")

Array: TypeAlias = npt.NDArray[Any]

_HOST_CLOCKS: Final = (int(Clock.WAIT), int(Clock.FUTURE))
_NO_OWN_TIME: Final = int(Flag.CAPTURED | Flag.SIMULATED)


class _Fields(Protocol):
    """Records, or some of their fields: arrays of shape (n,) by field name."""

    def __getitem__(self, name: str, /) -> Array:
        """Return a field of all records, shape (n,)."""


def durations(measure: str, records: _Fields) -> Array:
    """Return the duration of each record in ns by one of MEASURES, int64, -1 if it is not known."""
    if measure == "in_call":
        return _between(records["t_begin"], records["t_return"], records)
    if measure == "waiting":
        waited = wait_begin(records)
        return _between(waited, np.maximum(records["t_end"], waited), records)
    return _between(records["t_begin"], records["t_end"], records)


def transfer_times(records: _Fields) -> Array:
    """Return the time from `transfer_begin` to the end of each record in ns, int64, -1 if it is not known."""
    return _between(transfer_begin(records), records["t_end"], records)


def has_own_times(records: _Fields) -> Array:
    """Return whether the times of each record are its own, bool: not captured into a device graph, not simulated."""
    return np.asarray((records["flags"] & _NO_OWN_TIME) == 0)


def wait_begin(records: _Fields) -> Array:
    """Return when the program began to wait for each record in ns, 0 if its end was not observed on the host."""
    return np.where(np.isin(records["clock"], _HOST_CLOCKS), records["t_wait"], 0)


def transfer_begin(records: _Fields) -> Array:
    """Return when the transfer of each record began on the device in ns; if not known, when the call began."""
    return np.where(records["t_start"] > 0, records["t_start"], records["t_begin"])


def _between(begin: Array, end: Array, records: _Fields) -> Array:
    return np.where(has_own_times(records) & (begin > 0) & (end >= begin), end - begin, -1)
