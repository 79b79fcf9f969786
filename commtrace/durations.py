"""Durations of recorded calls, from the times in their records.

The measures of `MEASURES`: "in_call" is t_return - t_begin, "waiting" t_end - t_wait (0 if a callback observed the
end before the wait), "to_completion" t_end - t_begin. Calls captured into a device graph and calls of dry runs have no
times of their own, so their durations are unknown.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from commtrace.schema import Clock, Fields, Flag

MEASURES: Final = ("in_call", "waiting", "to_completion")

Array: TypeAlias = npt.NDArray[Any]

_HOST_CLOCKS: Final = (int(Clock.WAIT), int(Clock.FUTURE))
_NO_OWN_TIME: Final = int(Flag.CAPTURED | Flag.SIMULATED)
_NO_EXACT_END: Final = int(Flag.CAPTURED | Flag.SIMULATED | Flag.COALESCED | Flag.SPARSE | Flag.UNEVEN | Flag.OBJECT)


def durations(measure: str, records: Fields) -> Array:
    """Return the duration of each record in ns by one of MEASURES, int64, -1 if it is not known."""
    if measure == "in_call":
        return _between(records["t_begin"], records["t_return"], records)
    if measure == "waiting":
        waited = wait_begin(records)
        return _between(waited, np.maximum(records["t_end"], waited), records)
    return _between(records["t_begin"], records["t_end"], records)


def flight_times(records: Fields) -> Array:
    """Return the time from arrival to the end of each record in ns, int64, -1 if it is not known."""
    return _between(arrivals(records), records["t_end"], records)


def has_own_times(records: Fields) -> Array:
    """Return whether the times of each record are its own, bool: not captured into a device graph, not simulated."""
    return np.asarray((records["flags"] & _NO_OWN_TIME) == 0)


def wait_begin(records: Fields) -> Array:
    """Return when the program began to wait for each record in ns, 0 if its end was not observed on the host."""
    return np.where(np.isin(records["clock"], _HOST_CLOCKS), records["t_wait"], 0)


def arrivals(records: Fields) -> Array:
    """Return when each call became active, ns, shape (n,): when it began, on a device after earlier work."""
    return np.asarray(np.maximum(records["t_begin"], records["t_start"]))


def exact_ends(records: Fields) -> Array:
    """Return whether each record's end is the end of the transfer, not a later observation, bool, shape (n,).

    An end is exact if the call, a completion callback or the device observed it. An end observed by a wait is exact
    only if the program did not request a handle, because such a call waits at once. Calls of coalesced batches and
    captured graphs have no exact end.
    """
    clock = records["clock"]
    exact = np.isin(clock, (int(Clock.RETURN), int(Clock.FUTURE)))
    exact |= (clock == int(Clock.WAIT)) & ((records["flags"] & int(Flag.ASYNC)) == 0)
    exact |= (clock == int(Clock.DEVICE)) & (records["t_start"] > 0)
    return np.asarray(exact & ((records["flags"] & _NO_EXACT_END) == 0) & (records["batch"] == 0))


def _between(begin: Array, end: Array, records: Fields) -> Array:
    return np.where(has_own_times(records) & (begin > 0) & (end >= begin), end - begin, -1)
