"""Measurement of one operation and size: one checked call, a warm-up, then timed rounds.

A round is a barrier and then a number of consecutive calls, timed as a whole on every rank, as nccl-tests times them
(`-n`). Its time is the slowest rank's (`-a 3`), divided by the number of calls. Rounds show the variation: `min`,
`avg`, `median` and `max` are over rounds. The OSU micro-benchmarks report the average, minimum and maximum of the
ranks' own means instead: `rank_avg`, `rank_min` and `rank_max`. The barrier is never timed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from commtrace.operations import OPERATIONS, Flow

from .bench_operations import (
    BARRIER,
    ELEMENT_BYTES,
    PING_PONG,
    WINDOW,
    Values,
    expected_values,
    input_elements,
    is_in_place,
    output_elements,
    payload_elements,
    rank_values,
    window_messages,
)

ROUNDS: Final = 10
_MIN_ROUNDS: Final = 3
_MAX_CALLS: Final = 1000

_SMALL_BYTES: Final = 64 << 10
_SMALL_WARMUP, _LARGE_WARMUP = 20, 2
"""Warm-up calls: for messages up to 64 KiB; for larger messages and windows, whose times are stable sooner."""

Call = Callable[[], object]


class BenchGroup(Protocol):
    """A group of ranks in the measured library; this process is one of them. The root is rank 0."""

    rank: int
    size: int

    def buffer(self, count: int) -> Any:
        """Allocate float32 zeros in the memory that the library communicates from (host or device)."""

    def fill(self, buffer: Any, values: Values) -> None:
        """Write values into a buffer of the same length."""

    def values(self, buffer: Any) -> Values:
        """Return the values in a buffer."""

    def call(self, op: str, source: Any, result: Any, messages: int) -> Call:
        """Return a function that calls the operation and returns when it is complete or in the device's queue.

        Args:
            op: One of `BENCH_OPERATIONS`.
            source: Input buffer. In-place operations (torch's all_reduce, broadcast, reduce) use only `result`.
            result: Output buffer.
            messages: Number of messages in a window.
        """

    def settle(self) -> None:
        """Wait until the device has completed all calls. In a blocking library, they are already complete."""
        return

    def barrier(self) -> None:
        """Wait for all ranks of the group."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, which are small objects, on every rank."""


class BenchLibrary(Protocol):
    """torch.distributed or mpi4py in this process, with all ranks connected."""

    rank: int
    size: int
    local_rank: int

    def group(self, ranks: Sequence[int]) -> BenchGroup | None:
        """Make a group of ranks; return None if this rank is not in it. All ranks call this, in the same order."""

    def wait(self) -> None:
        """Wait for all ranks without keeping a core busy: other ranks of this host may be measuring."""

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the measured libraries."""

    def close(self) -> None:
        """Disconnect. All ranks call this."""

    def abort(self) -> None:
        """Terminate the other ranks after a failure of this one, if broken connections do not."""
        return


def message_call(
    op: str, rank: int, source: Any, result: Any, answer: Any, messages: int, *,
    send: Callable[[Any], object], recv: Callable[[Any], object], isend: Callable[[Any], object],
    irecv: Callable[[Any], object], wait_all: Callable[[list[Any]], object],
) -> Call:  # fmt: skip
    """Return the function that a rank of a pair calls to exchange messages.

    `answer` is a buffer of one element. The functions of the library send a buffer to the other rank or receive one.
    """
    calls: dict[tuple[str, int], Call] = {
        (PING_PONG, 0): lambda: (send(source), recv(result)),
        (PING_PONG, 1): lambda: (recv(result), send(source)),
        (WINDOW, 0): lambda: (wait_all([isend(source) for _ in range(messages)]), recv(answer)),
        (WINDOW, 1): lambda: (wait_all([irecv(result) for _ in range(messages)]), send(answer)),
    }
    return calls[op, rank]


class BenchBuffers:
    """Input and output buffers at the same addresses for all sizes up to `payload`, as in nccl-tests and OMB.

    If each size had its own buffer, malloc would decide whether it is on huge pages: MPICH's messages of 2 MiB took 88
    or 170 us, depending on what had been freed before.
    """

    def __init__(self, group: BenchGroup, payload: int) -> None:
        count = payload // ELEMENT_BYTES
        self._source, self._result = group.buffer(count), group.buffer(count)

    def of(self, op: str, count: int, ranks: int) -> tuple[Any, Any]:
        """Return the input and the output of a rank for a payload of `count` elements."""
        source, result = input_elements(op, count, ranks), output_elements(op, count, ranks)
        return self._source[:source], self._result[:result]


@dataclass(frozen=True)
class BenchRow:
    """Measured times of one operation, size and group.

    Times are microseconds of one call (send_recv: of one direction). `calls` is the number of calls of one round,
    `wrong` the number of elements with wrong values, over all ranks. None: another benchmark's table does not state it.
    """

    op: str
    ranks: int
    hosts: int
    payload_bytes: int
    calls: int | None
    rounds: int
    min_us: float
    avg_us: float
    median_us: float
    max_us: float
    rank_avg_us: float
    rank_min_us: float | None
    rank_max_us: float | None
    wrong: int | None


def measure(
    group: BenchGroup,
    op: str,
    size: int,
    hosts: int,
    seconds: float,
    buffers: BenchBuffers,
    clock: Callable[[], float] = time.perf_counter,
) -> BenchRow | None:
    """Measure one operation and size. All ranks of the group call this and get the same row.

    Args:
        group: The ranks.
        op: One of `BENCH_OPERATIONS`.
        size: Payload in bytes.
        hosts: Number of hosts of the group.
        seconds: Time to spend, without warm-up.
        buffers: Buffers for payloads of at least `size`.
        clock: Returns seconds.

    Returns:
        The row; None if `size` bytes are too few for equal shares of the ranks.
    """
    count = 0 if op == BARRIER else payload_elements(op, size, group.size)
    if not count and op != BARRIER:
        return None
    payload = count * ELEMENT_BYTES
    messages = window_messages(payload) if op == WINDOW else 1
    source, result = buffers.of(op, count, group.size)
    call = group.call(op, source, result, messages)
    wrong = 0 if op == BARRIER else _wrong_elements(group, op, count, source, result, call)

    def time_round(calls: int) -> float:
        group.settle()
        group.barrier()
        begin = clock()
        for _ in range(calls):
            call()
        group.settle()
        return clock() - begin

    warmup = _SMALL_WARMUP if payload <= _SMALL_BYTES and messages == 1 else _LARGE_WARMUP
    call()  # makes connections and touches the memory
    warmup_seconds = max(seconds_of_rank for (seconds_of_rank,) in group.gather([time_round(warmup)]))
    call_seconds = max(warmup_seconds / warmup, 1e-7)
    rounds, calls = ROUNDS, min(_MAX_CALLS, math.ceil(seconds / ROUNDS / call_seconds))
    if call_seconds * ROUNDS > seconds:
        rounds, calls = max(_MIN_ROUNDS, min(ROUNDS, int(seconds / call_seconds))), 1
    seconds_by_rank = group.gather([time_round(calls) for _ in range(rounds)])
    us = 1e6 / calls * (0.5 if op == PING_PONG else 1 / messages)
    round_us = [max(times) * us for times in zip(*seconds_by_rank, strict=True)]
    rank_us = [statistics.fmean(times) * us for times in seconds_by_rank]
    of_rounds = min(round_us), statistics.fmean(round_us), statistics.median(round_us), max(round_us)
    of_ranks = statistics.fmean(rank_us), min(rank_us), max(rank_us)
    return BenchRow(op, group.size, hosts, payload, calls, rounds, *of_rounds, *of_ranks, wrong)


def _wrong_elements(group: BenchGroup, op: str, count: int, source: Any, result: Any, call: Call) -> int:
    """Call once with the ranks' test values, count wrong elements of all ranks, and reset the buffers to zero."""
    values = rank_values(count)
    in_place = is_in_place(op)
    for buffer in (source, result) if in_place else (source,):
        group.fill(buffer, values[: input_elements(op, count, group.size)] + group.rank)
    if in_place and OPERATIONS[op].flow is Flow.FROM_ROOT and group.rank:
        group.fill(result, values * 0 - 1)
    call()
    group.settle()
    expected = expected_values(op, values, group.rank, group.size)
    wrong = 0 if expected is None else int((group.values(result) != expected).sum())
    for buffer in (source, result):  # zeros stay zeros, however often they are summed
        group.fill(buffer, group.values(buffer) * 0)
    return int(sum(wrong_of_rank for (wrong_of_rank,) in group.gather([wrong])))
