"""Clocks: for each host, its clock minus a reference host's, as bounds (`clock_alignment`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from commtrace.analyses.grouping import Array, positions_by_value
from commtrace.reading.recorded_run import RecordedRun

from .aligned_clock import AlignedClock
from .matching import host_numbers

USEFUL_NS: Final = 1_000_000
"""Half-width of bounds above which wall clocks kept by NTP are likely to be more accurate."""


@dataclass(frozen=True, eq=False)
class Clocks:
    """The clocks of a run's hosts.

    Attributes:
        hosts: Their names. Each boot of a host counts as a host.
        host_of_process: Position of each process's host in `hosts`, shape (processes,).
        reference: Position of the reference host.
        aligned: The clock of each host; None where nothing bounds it.
    """

    hosts: Sequence[str]
    host_of_process: Array
    reference: int
    aligned: Sequence[AlignedClock | None]

    def to_reference(self, processes: Array, readings: Array) -> Array | None:
        """Return times of the reference's clock at readings of processes' clocks, int64, shape (n,).

        They are the middles of the bounds. None if a host's bounds are missing or wider than
        USEFUL_NS: its wall clock is then likely to be more accurate.
        """
        times = np.zeros(len(readings), np.int64)
        for host, at in positions_by_value(self.host_of_process[processes]).items():
            clock = self.aligned[host]
            if clock is None or clock.half_width_ns > USEFUL_NS:
                return None
            earliest, latest = clock.to_reference(readings[at])
            times[at] = earliest + (latest - earliest) // 2
        return times

    @property
    def are_useful(self) -> bool:
        """Whether all hosts' bounds are at most as wide as USEFUL_NS."""
        return self.half_width_ns <= USEFUL_NS

    @property
    def half_width_ns(self) -> float:
        """The largest half-width of a host's bounds, infinite where a host has none."""
        return max(np.inf if clock is None else clock.half_width_ns for clock in self.aligned)


def to_one_clock(run: RecordedRun, clocks: Clocks, processes: Array, readings: Array) -> tuple[Array, Array]:
    """Return times of one clock at readings of processes' clocks, and whether each is known, shape (n,).

    The clock is the reference's if calls bound all others; else the wall clock, as well as hosts
    synchronise it.
    """
    times = clocks.to_reference(processes, readings)
    if times is not None:
        return times, np.ones(len(readings), bool)
    offsets = wall_clock_offsets(run)
    offset_of = np.array([offsets.get(number, 0) for number in range(len(run.processes))], np.int64)
    return readings + offset_of[processes], np.isin(processes, [*offsets])


def wall_clock_offsets(run: RecordedRun) -> dict[int, int]:
    """Return wall-clock minus monotonic ns by process, if known; equal within a boot of a host."""
    hosts = host_numbers(run)[1].tolist()
    offsets: dict[int, int] = {}
    for number, host in enumerate(hosts):
        if (offset := run.labels.clock_offsets[number]) is not None:
            offsets.setdefault(host, offset)
    return {number: offsets[host] for number, host in enumerate(hosts) if host in offsets}
