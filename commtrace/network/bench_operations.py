"""The measured operations and the sizes of their buffers, as in nccl-tests (its doc/PERFORMANCE.md), in elements.

Collectives are those of `commtrace.operations`, with the same payload, so that measurements and recorded calls count
the same bytes. A share is the payload divided by the number of ranks. Further measurements:

| operation | payload |
| --- | --- |
| send_recv | a message there and back; half of the time (osu_latency) |
| send_recv_window | many messages one way, then an answer; the time per message (osu_bw) |
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from commtrace.operations import OPERATIONS, Extent, Flow, operations_where
from commtrace.volume import busbw_factor

Values = npt.NDArray[np.float32]

COLLECTIVES: Final = operations_where(lambda operation: operation.schedule and operation.busbw)
PING_PONG, WINDOW, BARRIER = "send_recv", "send_recv_window", "barrier"
POINT_TO_POINT: Final = (PING_PONG, WINDOW)
BENCH_OPERATIONS: Final = (*COLLECTIVES, *POINT_TO_POINT, BARRIER)

ELEMENT_BYTES: Final = 4
"""Bytes of an element: float32, the default of nccl-tests."""

WINDOW_MESSAGES: Final = 64
"""Messages in flight, the default of osu_bw."""
_WINDOW_BYTES: Final = 64 << 20

_PERIOD: Final = 251
"""Period of the values in a buffer: a prime, so that a share in the wrong place is detected."""


def payload_elements(op: str, payload: int, ranks: int) -> int:
    """Return the number of elements of the largest payload up to `payload` bytes with equal shares; 0: none."""
    count = payload // ELEMENT_BYTES
    return count // ranks * ranks if op in COLLECTIVES and OPERATIONS[op].has_parts else count


def input_elements(op: str, count: int, ranks: int) -> int:
    """Return the number of elements in the input of a rank that has an input."""
    return count // ranks if op in COLLECTIVES and OPERATIONS[op].input is Extent.SHARE else count


def output_elements(op: str, count: int, ranks: int) -> int:
    """Return the number of elements in the output of a rank that has an output."""
    return count // ranks if op in COLLECTIVES and OPERATIONS[op].output is Extent.SHARE else count


def is_in_place(op: str) -> bool:
    """Return whether the input and the output of a rank are one buffer."""
    return op in COLLECTIVES and OPERATIONS[op].input is OPERATIONS[op].output is Extent.WHOLE


def bus_bytes(op: str, payload: Any, ranks: int) -> Any:
    """Return the bytes that busbw counts (`commtrace.volume`): those that the busiest rank must send.

    With a time of latency + bus bytes / bandwidth, an ideal network has the same bandwidth for every number of ranks.
    """
    factor = busbw_factor("send" if op in POINT_TO_POINT else op, ranks)
    return payload * (factor if factor is not None else 1.0)


def payload_sizes(min_bytes: int, max_bytes: int) -> list[int]:
    """Return `min_bytes` times powers of two, up to `max_bytes`."""
    return [min_bytes << power for power in range((max_bytes // min_bytes).bit_length())]


def window_messages(payload: int) -> int:
    """Return the messages in flight: 64 as in osu_bw, fewer if large, because fewer then reach full bandwidth."""
    return max(2, min(WINDOW_MESSAGES, _WINDOW_BYTES // max(payload, 1)))


def rank_values(count: int) -> Values:
    """Return the values of rank 0; rank r adds r to each. Sums over ranks are exact in float32."""
    return (np.arange(count) % _PERIOD).astype(np.float32)


def expected_values(op: str, values: Values, rank: int, ranks: int) -> Values | None:
    """Return the correct output of a rank; None if it has no output.

    The root is rank 0. In a window of messages only rank 1 receives.

    Args:
        op: One of BENCH_OPERATIONS.
        values: `rank_values` of the whole payload.
        rank: The rank.
        ranks: Number of ranks of the group.
    """
    if op not in COLLECTIVES:
        return values + (1 - rank) if op == PING_PONG or (op == WINDOW and rank) else None
    operation = OPERATIONS[op]
    if operation.flow is Flow.TO_ROOT and rank:
        return None
    share = len(values) // ranks
    own_share = values[rank * share : (rank + 1) * share]
    if operation.reduces:
        summed = own_share if operation.output is Extent.SHARE else values
        return (summed * ranks + ranks * (ranks - 1) / 2).astype(np.float32)
    if operation.flow is Flow.FROM_ROOT:
        return own_share if operation.output is Extent.SHARE else values
    sent = own_share if operation.input is Extent.SPLITS else values[:share]
    return np.concatenate([sent + other for other in range(ranks)])
