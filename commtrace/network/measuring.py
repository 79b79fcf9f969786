"""One operation and size: checked once, warmed up, then timed in rounds.

A round is a barrier and then a number of calls, one right after the other, timed as a whole on every rank, as
nccl-tests times them (`-n`). Its time is that of the slowest rank (`-a 3`) divided by the calls. Rounds show how much
it varies: `min`, `avg`, `median` and `max` are over rounds. The OSU micro-benchmarks give the average, the least and
the greatest of the ranks' own means instead: `rank_avg`, `rank_min` and `rank_max`. The barrier is never timed.
"""

from __future__ import annotations

import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .operations import (
    BARRIER,
    ELEMENT_BYTES,
    PING_PONG,
    ROOTED,
    WINDOW,
    Values,
    expected_values,
    input_elements,
    output_elements,
    payload_elements,
    test_values,
    window_messages,
)

ROUNDS: Final = 10
_FEWEST_ROUNDS: Final = 3
_MOST_CALLS: Final = 1000
_SMALL: Final = 64 << 10
_WARM_SMALL, _WARM_LARGE = 20, 2
"""Calls before the clock runs, of messages up to 64 KiB, and of larger ones and windows, which settle at once."""

Call = Callable[[], object]


class BenchGroup(ABC):
    """Ranks that communicate, as a library has them; this process is one of them. The root of all is rank 0."""

    rank: int
    size: int

    @abstractmethod
    def buffer(self, count: int) -> Any:
        """Room for so many float32, zeros, where the library takes it (host memory or a device)."""

    @abstractmethod
    def fill(self, buffer: Any, values: Values) -> None:
        """Write values into a buffer of the same length."""

    @abstractmethod
    def values(self, buffer: Any) -> Values:
        """What is in a buffer now."""

    @abstractmethod
    def call(self, op: str, source: Any, result: Any, messages: int) -> Call:
        """The operation, from one buffer into another; it is complete, or in the device's queue, when it returns.

        In-place operations (torch's all_reduce, broadcast, reduce) take `result` alone. `messages`: those of a window.
        """

    @abstractmethod
    def settle(self) -> None:
        """Wait until the device has done all calls."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of every rank, on all of them."""


class BenchBuffers:
    """What is given and what is taken, of all sizes up to one, at the same addresses, as nccl-tests and OMB have it.

    A buffer of each size's own lies where malloc puts it, on huge pages or not: MPICH's messages of 2 MiB took 88 or
    170 us with it, depending on what had been freed before.
    """

    def __init__(self, group: BenchGroup, payload: int) -> None:
        count = payload // ELEMENT_BYTES
        self._source, self._result = group.buffer(count), group.buffer(count)

    def of(self, op: str, count: int, ranks: int) -> tuple[Any, Any]:
        """What a rank gives and takes, for a payload of so many elements."""
        return self._source[: input_elements(op, count, ranks)], self._result[: output_elements(op, count, ranks)]


@dataclass(frozen=True)
class BenchRow:
    """One operation, size and group, as measured. Times are microseconds of one call (send_recv: of one way)."""

    op: str
    ranks: int
    hosts: int
    payload_bytes: int
    calls: int
    """Of one round."""
    rounds: int
    min_us: float
    avg_us: float
    median_us: float
    max_us: float
    rank_avg_us: float
    rank_min_us: float
    rank_max_us: float
    wrong: int
    """Elements that were not what they must be, over all ranks."""


def measure(
    group: BenchGroup,
    op: str,
    size: int,
    hosts: int,
    seconds: float,
    memory: BenchBuffers,
    clock: Callable[[], float] = time.perf_counter,
) -> BenchRow | None:
    """A row, the same on all ranks of the group; None where `size` bytes cannot be shared by so many ranks."""
    count = 0 if op == BARRIER else payload_elements(op, size, group.size)
    if not count and op != BARRIER:
        return None
    payload = count * ELEMENT_BYTES
    messages = window_messages(payload) if op == WINDOW else 1
    call, wrong = _prepared(group, op, count, messages, memory)
    warm = _WARM_SMALL if payload <= _SMALL and messages == 1 else _WARM_LARGE
    call()  # connections are made, and memory is touched, for the first time
    warmed = _slowest(group, [_round(group, call, warm, clock)])[0] / warm
    rounds, calls = _amount(warmed, seconds)
    all_ranks = group.gather([_round(group, call, calls, clock) for _ in range(rounds)])
    part = 0.5 if op == PING_PONG else 1 / messages
    slowest = [max(times) / calls * part * 1e6 for times in zip(*all_ranks, strict=True)]
    means = [statistics.fmean(times) / calls * part * 1e6 for times in all_ranks]
    return BenchRow(
        op,
        group.size,
        hosts,
        payload,
        calls,
        rounds,
        min(slowest),
        statistics.fmean(slowest),
        statistics.median(slowest),
        max(slowest),
        statistics.fmean(means),
        min(means),
        max(means),
        wrong,
    )


def _prepared(group: BenchGroup, op: str, count: int, messages: int, memory: BenchBuffers) -> tuple[Call, int]:
    """The call on buffers of zeros, and how many elements of all ranks were wrong when they held values."""
    values = test_values(count)
    source, result = memory.of(op, count, group.size)
    call = group.call(op, source, result, messages)
    if op == BARRIER:
        return call, 0
    for buffer in (source, result) if _in_place(op) else (source,):
        group.fill(buffer, values[: input_elements(op, count, group.size)] + group.rank)
    if op == "broadcast" and group.rank:
        group.fill(result, values * 0 - 1)
    call()
    group.settle()
    right = expected_values(op, values, group.rank, group.size)
    wrong = 0 if right is None else int((group.values(result) != right).sum())
    for buffer in (source, result):  # zeros stay zeros, however often they are summed, and are the next size's
        group.fill(buffer, group.values(buffer) * 0)
    return call, int(sum(found for (found,) in group.gather([wrong])))


def _in_place(op: str) -> bool:
    return op == "all_reduce" or (op in ROOTED and op not in ("gather", "scatter"))


def _round(group: BenchGroup, call: Call, calls: int, clock: Callable[[], float]) -> float:
    """Seconds of this rank for so many calls."""
    group.settle()
    group.barrier()
    begin = clock()
    for _ in range(calls):
        call()
    group.settle()
    return clock() - begin


def _slowest(group: BenchGroup, times: Sequence[float]) -> list[float]:
    return [max(found) for found in zip(*group.gather(times), strict=True)]


def _amount(one: float, seconds: float) -> tuple[int, int]:
    """Rounds, and calls in each, that fill so many seconds with calls of `one` second."""
    one = max(one, 1e-7)
    if one * ROUNDS > seconds:
        return max(_FEWEST_ROUNDS, min(ROUNDS, int(seconds / one))), 1
    return ROUNDS, min(_MOST_CALLS, math.ceil(seconds / ROUNDS / one))
