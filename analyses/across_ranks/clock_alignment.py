"""Alignment of the clocks of a run's hosts, from bounds that follow from the recorded calls alone.

An operation that waits for a call cannot end before that call has begun (`dependencies`). Let f be
a host's clock as a function of the reference's. A call that began at `begin` on one host, and a
call that waited for it and ended at `end` on the other, then give

    begin <= f(end)      if the reference waited        a lower bound of f
    f(begin) <= end      if the host waited             an upper bound of f

An end observed late gives a wider, but still valid, bound; `aligned_clock` makes a clock of the
bounds. Hosts that share no operation with the reference are bounded through hosts that are already
aligned: their calls of an operation give a time before which it had not begun everywhere, and one
after which it had. Device times are used as the recorder mapped them to the host's clock, with the
error added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from commtrace.analyses.grouping import Array, positions_by_value
from commtrace.analyses.record_blocks import RecordBlock
from commtrace.reading.recorded_run import RecordedRun

from .aligned_clock import AlignedClock, clock_within, reference_clock
from .call_times import COLUMNS as TIME_COLUMNS
from .clocks import Clocks
from .corridors import Bounds
from .dependencies import SOURCE, TARGET, agree, completions
from .matching import NOT_MATCHED, CallTable, Derived, MatchedCalls, every_nth, host_numbers, match_calls

MAX_CALLS: Final = 12_000_000
"""Calls that are matched at a time; of a longer log, every n-th operation is used."""

_MARGIN_NS: Final = 1_000_000_000
_MAX_SWEEPS: Final = 64
_MAX_TESTED: Final = 4
_NEVER, _ALWAYS = np.iinfo(np.int64).max, np.iinfo(np.int64).min


def align_clocks(run: RecordedRun, table: CallTable | None = None) -> Clocks:
    """Return the clocks of a run's hosts.

    Args:
        run: The run. Nothing is read if it has one host.
        table: Its calls, with the columns of `call_times`; None: read them.
    """
    hosts, host_of_process = host_numbers(run)
    if len(hosts) < 2 or run.simulated:
        return Clocks(hosts, host_of_process, 0, [reference_clock(0, 0), *(None for _ in hosts[1:])])
    calls = match_calls(run, [], derived=TIME_COLUMNS, keep=calls_that_align(run)) if table is None else table.part(0)
    calls = replace(calls, columns={**calls.columns, "completion": completions(run, calls)})
    return _Aligner(calls, hosts, host_of_process).align()


def calls_that_align(run: RecordedRun) -> Derived:
    """Return a function, for `match_calls`, that says which calls tell about the clocks of the run's hosts.

    These are the calls in groups of several hosts, or a part of them in a long log.
    """
    records = sum(segment.count for process in run.processes for segment in process.segments)
    return partial(_is_across_hosts, _groups_across_hosts(run), -(-records // MAX_CALLS) or 1)


def _is_across_hosts(across_hosts: Array, n: int, block: RecordBlock) -> Array:
    return np.asarray(across_hosts[block["group"]] & every_nth(n, block))


def _groups_across_hosts(run: RecordedRun) -> Array:
    """Return whether the ranks of each group are on several hosts, bool, by the group's id in the run."""
    hosts_of_rank: dict[int, set[int]] = defaultdict(set)
    for process, host in zip(run.processes, host_numbers(run)[1].tolist(), strict=True):
        hosts_of_rank[process.rank].add(host)
    across_hosts = np.zeros(len(run.labels.groups) + 2, bool)
    for number, group in run.labels.groups.items():
        across_hosts[number] = len(set().union(*(hosts_of_rank.get(rank, ()) for rank in group.ranks))) > 1
    return across_hosts


class _Aligner:
    """Alignment of one host after the other, with bounds on the moment of each operation.

    The moment of an operation is any at which all its sources have begun and no target has ended.
    `began` is the latest time, on the reference's clock, at which a source had certainly not begun;
    `ended` is the earliest at which a target had certainly ended.
    """

    def __init__(self, calls: MatchedCalls, hosts: Sequence[str], host_of_process: Array) -> None:
        self.calls, self.hosts, self.host_of_process = calls, hosts, host_of_process
        self.began, self.ended = np.full(len(calls.channel), _ALWAYS), np.full(len(calls.channel), _NEVER)
        self._processes = positions_by_value(host_of_process)
        self._host = host_of_process[calls["process"][calls.matched]]
        self._tells = agree(calls) & self._has_several_hosts()

    def align(self) -> Clocks:
        """Return the clocks."""
        reference = self._reference()
        others = [host for host in range(len(self.hosts)) if host != reference]
        clocks = self._relative_to(reference, others)
        if self._count_odd(clocks) * 2 > len(others) > 1:
            # If all of the others agree with another one, it is the reference's clock that is odd.
            other, *tested = others[: _MAX_TESTED + 1]
            trial = self._relative_to(other, tested)
            if all(trial[host] is not None for host in tested) and not self._count_odd(trial):
                reference, clocks = other, self._relative_to(other, sorted({reference, *others} - {other}))
        return Clocks(self.hosts, self.host_of_process, reference, clocks)

    @staticmethod
    def _count_odd(clocks: Sequence[AlignedClock | None]) -> int:
        return sum(clock is not None and clock.is_odd for clock in clocks)

    def _relative_to(self, reference: int, others: Sequence[int]) -> list[AlignedClock | None]:
        """Return the clocks of other hosts relative to a reference; None for all that are not aligned."""
        self.began[:], self.ended[:] = _ALWAYS, _NEVER
        aligned: list[AlignedClock | None] = [None] * len(self.hosts)
        clock = aligned[reference] = reference_clock(*self._span(reference))
        self._update_moments(reference, clock)
        known = np.zeros(len(self.hosts), np.int64)
        for _ in range(_MAX_SWEEPS):
            before = known.copy()
            for host in others:
                rows = self._known_rows(host)
                count = sum(map(len, rows))
                fitted = self._fit(host, *rows) if count > known[host] else None
                if fitted is not None:
                    known[host], aligned[host] = count, fitted
                    self._update_moments(host, fitted)
            if (known == before).all():
                break
        return aligned

    def _has_several_hosts(self) -> Array:
        """Return whether the calls of each instance are of several hosts: only these say something about clocks."""
        instance = self.calls["instance"][self.calls.matched]
        of_instance = np.zeros(len(self.calls.channel), np.int64)
        of_instance[instance] = self._host
        several = np.zeros(len(self.calls.channel), bool)
        several[instance[of_instance[instance] != self._host]] = True
        return several

    def _reference(self) -> int:
        """Return the first host with the most calls in operations of several hosts."""
        is_told = self._tells[self.calls["instance"][self.calls.matched]]
        return int(np.bincount(self._host[is_told], minlength=len(self.hosts)).argmax())

    def _rows(self, host: int) -> Array:
        """Return the indices of the usable calls of a host."""
        rows = np.concatenate([self.calls.of_process(number) for number in self._processes[host]])
        rows = rows[(self.calls["instance"][rows] != NOT_MATCHED) & (self.calls["arrival"][rows] > 0)]
        return np.asarray(rows[self._tells[self.calls["instance"][rows]]])

    def _sources_and_targets(self, host: int) -> tuple[Array, Array]:
        rows = self._rows(host)
        depends, ended = self.calls["depends"][rows], self.calls["completion"][rows] > 0
        return rows[(depends & SOURCE) > 0], rows[((depends & TARGET) > 0) & ended]

    def _span(self, host: int) -> tuple[int, int]:
        rows = self._rows(host)
        if not len(rows):
            return 0, 0
        begin, end = self.calls["arrival"][rows], self.calls["completion"][rows]
        return int(begin.min()), int(max(begin.max(), end.max()))

    def _update_moments(self, host: int, clock: AlignedClock) -> None:
        """Update the bounds on moments from the calls of an aligned host while its bounds hold."""
        (sources, targets), instance = self._sources_and_targets(host), self.calls["instance"]
        for name, at, moments, bound, side in (
            ("arrival", sources, self.began, np.maximum, 0),
            ("completion", targets, self.ended, np.minimum, 1),
        ):
            interval = clock.to_reference(self.calls[name][at])
            holds = (interval[0] >= clock.used_at[0]) & (interval[1] <= clock.used_at[1])
            bound.at(moments, instance[at[holds]], interval[side][holds])

    def _known_rows(self, host: int) -> tuple[Array, Array]:
        """Return the indices of a host's sources and targets that have a bounded moment."""
        (sources, targets), instance = self._sources_and_targets(host), self.calls["instance"]
        return sources[self.ended[instance[sources]] != _NEVER], targets[self.began[instance[targets]] != _ALWAYS]

    def _fit(self, host: int, sources: Array, targets: Array) -> AlignedClock | None:
        if not len(sources) or not len(targets):
            return None
        calls = self.calls
        at = np.concatenate([self.ended[calls["instance"][sources]], self.began[calls["instance"][targets]]])
        value = np.concatenate([calls["arrival"][sources], calls["completion"][targets]]) - at
        upper = np.arange(len(at)) >= len(sources)
        order = np.argsort(at, kind="stable")
        origin, base = int(at[order[0]]), int(value[0])
        call = np.concatenate([sources, targets])[order]
        bounds = Bounds(
            (at[order] - origin).astype(np.float64), (value[order] - base).astype(np.float64), upper[order], call
        )
        begin, end = (time - base - origin for time in self._span(host))
        return clock_within(bounds, origin, base, (begin - _MARGIN_NS, end + _MARGIN_NS))
