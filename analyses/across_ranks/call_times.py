"""Times of matched calls: the model that all tables of waiting, steps and critical paths are sums of.

    arrival     the call became active: it began, on a device after earlier work
    release     the last of the calls that it depends on (`dependencies`), itself included, arrived
    end         the call was complete, as observed
    wait        from arrival to release
    transfer    from release to end; wait + transfer is exactly the duration, from arrival to end

A call that depends on no other (the root of a broadcast, a send) is released by its own arrival, except a send that
lasts until its receive arrives. Within one host, releases are exact. Between hosts, they lie in an interval, from the
bounds of the hosts' clocks: `wait` is its middle, or 0 if the interval begins at 0. Nothing is known about calls
without a bounded interval, without an observed end, or of operations that are not in the log of all ranks. Where ranks
may have no bytes for each other (uneven all_to_alls), the interval begins at 0. If an end is observed late, the delay
counts as transfer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from commtrace.analyses.grouping import Array, positions_by_value
from commtrace.analyses.record_blocks import RecordBlock
from commtrace.durations import arrivals, has_own_times
from commtrace.schema import State

from .clocks import Clocks
from .dependencies import SOURCE, TARGET, UNCERTAIN, agree, dependencies, operations
from .matching import Derived, MatchedCalls

_NEVER, _ALWAYS = np.iinfo(np.int64).max, np.iinfo(np.int64).min


def ends(block: RecordBlock) -> Array:
    """Return the observed end of each call in ns, shape (n,), 0 where it was not observed."""
    return np.where((block["state"] == State.COMPLETE) & has_own_times(block), block["t_end"], 0)


COLUMNS: Final[Mapping[str, Derived]] = {
    "arrival": arrivals, "end": ends, "depends": dependencies, "operation": operations,
}  # fmt: skip
"""Derived columns (`match_calls`) that `CallTimes.of` needs."""


@dataclass(frozen=True, eq=False)
class CallTimes:
    """Times of calls, each of shape (calls,), in the order of `MatchedCalls`; ns on the clock of the call's host.

    Attributes:
        calls: The calls, with the columns COLUMNS.
        clocks: The clocks of their hosts.
        known: Whether anything is known about the wait, bool; the following are 0 where not.
        duration: From arrival to end.
        wait: The wait.
        shortest: Lower bound of the wait.
        longest: Upper bound.
    """

    calls: MatchedCalls
    clocks: Clocks
    known: Array
    duration: Array
    wait: Array
    shortest: Array
    longest: Array

    @staticmethod
    def of(calls: MatchedCalls, clocks: Clocks) -> CallTimes:
        """Return the times of calls that have the columns COLUMNS."""
        arrival, end, depends, instance = (calls[name] for name in ("arrival", "end", "depends", "instance"))
        usable = (instance >= 0) & (arrival > 0) & (end >= arrival)
        if len(calls.channel):
            usable &= (calls.complete & agree(calls) & (calls.expected > 1))[instance]
        usable &= (depends & (SOURCE | TARGET | UNCERTAIN)) > 0
        first, last = _last_arrivals(calls, (depends & (SOURCE | UNCERTAIN)) > 0, clocks)
        is_send = sends(calls)
        if is_send.any():
            receive_first, receive_last = _last_arrivals(calls, receives(calls), clocks)
            # A buffered send has ended before its receive arrives: it does not wait.
            first = np.where(is_send, np.where(receive_first <= end, receive_first, 0), first)
            last = np.where(is_send, np.where(receive_first <= end, receive_last, 0), last)
        waiting = ((depends & (TARGET | UNCERTAIN)) > 0) | is_send
        duration = np.where(usable, end - arrival, 0)
        shortest, longest = (
            np.where(usable & waiting, np.clip(moment, arrival, np.maximum(end, arrival)) - arrival, 0)
            for moment in (first, last)
        )
        if len(calls.channel):
            shortest[(calls.largest(depends & UNCERTAIN) > 0)[instance]] = 0
        known = usable & ~((shortest == 0) & (longest == duration) & (longest > 0))
        wait = np.where(shortest > 0, shortest + (longest - shortest) // 2, 0)
        return CallTimes(calls, clocks, known, *(np.where(known, x, 0) for x in (duration, wait, shortest, longest)))

    @property
    def transfer(self) -> Array:
        """The rest of the duration."""
        return np.asarray(self.duration - self.wait)

    @property
    def release(self) -> Array:
        """When the last of the calls that it depends on arrived, itself included; -1 where not known."""
        return np.where(self.known, self.calls["arrival"] + self.wait, -1)

    @cached_property
    def last_process(self) -> Array:
        """Process whose arrival released the call, int64; its own if it waited for none, -1 where not known."""
        calls = self.calls
        awaited = calls.per_call(self._last_of((calls["depends"] & SOURCE) > 0), otherwise=-1)
        if (at := np.flatnonzero(sends(calls))).size:
            awaited[at] = self._last_of(receives(calls))[calls["instance"][at]]
        return np.where(self.known, np.where(self.wait > 0, awaited, calls["process"]), -1)

    def _last_of(self, sources: Array) -> Array:
        """Return the process of the source of each instance that arrived last, shape (instances,)."""
        at = self.calls.matched[sources[self.calls.matched]]
        process, arrival = self.calls["process"][at], self.calls["arrival"][at]
        moments = self.clocks.to_reference(process, arrival)
        at = at[np.argsort(arrival if moments is None else moments, kind="stable")]
        result = np.full(len(self.calls.channel), -1, np.int64)
        result[self.calls["instance"][at]] = self.calls["process"][at]
        return result


def sends(calls: MatchedCalls) -> Array:
    """Return which calls are sends that are matched with their receive, bool, shape (calls,)."""
    return np.asarray(_of_message(calls) & ((calls["depends"] & SOURCE) > 0))


def receives(calls: MatchedCalls) -> Array:
    """Return which calls are receives that are matched with their send, bool, shape (calls,)."""
    return np.asarray(_of_message(calls) & ((calls["depends"] & SOURCE) == 0))


def _of_message(calls: MatchedCalls) -> Array:
    """Return whether each call is matched with the other call of a message, bool, shape (calls,)."""
    is_message = np.array([channel.source >= 0 for channel in calls.channels], bool)
    return calls.per_call(is_message[calls.channel])


def _last_arrivals(calls: MatchedCalls, sources: Array, clocks: Clocks) -> tuple[Array, Array]:
    """Return bounds on the last arrival of a source of each call's instance, on its host's clock.

    Args:
        calls: Matched calls with the column "arrival".
        sources: Whether each call counts, bool, shape (calls,).
        clocks: The clocks of their hosts.

    Returns:
        Lower and upper bounds in ns, int64, shape (calls,); meaningless for calls without an
        instance.
    """
    hosts = {
        host: calls.matched[at]
        for host, at in positions_by_value(clocks.host_of_process[calls["process"][calls.matched]]).items()
    }
    own = np.full(len(calls), _ALWAYS)
    lower, upper = np.zeros((2, len(calls)), np.int64)
    earliest, latest, second, on_host = np.full((4, len(calls.channel)), _ALWAYS)
    latest_host = np.full(len(calls.channel), -1)
    for host, rows in hosts.items():
        here = calls["instance"][rows[sources[rows]]]
        np.maximum.at(on_host, here, calls["arrival"][rows[sources[rows]]])
        own[rows], arrived = on_host[calls["instance"][rows]], on_host[here]
        on_host[here] = _ALWAYS
        clock = clocks.aligned[host]
        if len(hosts) == 1:
            continue
        if clock is None:
            bounds = np.full(len(here), _ALWAYS), np.full(len(here), _NEVER)
        else:
            bounds = clock.to_reference(arrived)
        # An instance with several calls on the host occurs several times, with the same values.
        earliest[here] = np.maximum(earliest[here], bounds[0])
        is_last = bounds[1] > latest[here]
        second[here] = np.where(is_last, latest[here], np.maximum(second[here], bounds[1]))
        latest[here[is_last]], latest_host[here[is_last]] = bounds[1][is_last], host
    for host, rows in hosts.items():
        clock, instance = clocks.aligned[host], calls["instance"][rows]
        elsewhere = np.where(latest_host[instance] == host, second[instance], latest[instance])
        first = np.full(len(rows), _ALWAYS)
        last = np.where(elsewhere == _ALWAYS, _ALWAYS, _NEVER)
        if clock is not None:
            # Where a host has no bounds, the last arrival has no upper one; those of the other hosts are lower ones.
            known = (elsewhere != _ALWAYS) & (earliest[instance] != _ALWAYS)
            low, is_open = earliest[instance[known]], elsewhere[known] == _NEVER
            first[known], high = clock.from_reference(low, np.where(is_open, low, elsewhere[known]))
            last[known] = np.where(is_open, _NEVER, high)
        lower[rows], upper[rows] = np.maximum(own[rows], first), np.maximum(own[rows], last)
    return lower, upper
