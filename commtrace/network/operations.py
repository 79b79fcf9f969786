"""The measured operations and the sizes of their buffers, as in nccl-tests (its doc/PERFORMANCE.md), in elements.

The payload of an operation is the size that `commtrace.volume` documents, so that measurements and recorded calls count
the same bytes. A share is the payload divided by the number of ranks.

| operation | input of a rank | output of a rank | payload |
| --- | --- | --- | --- |
| all_reduce, broadcast, reduce | payload | payload | the buffer |
| all_gather, gather | share | payload | all shares |
| reduce_scatter, scatter | payload | share | all shares |
| all_to_all | payload | payload | the send buffer |
| send_recv | message | message | a message there and back; half of the time (osu_latency) |
| send_recv_window | message | message | many messages one way, then an answer; the time per message (osu_bw) |
| barrier | | | none |
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from commtrace.volume import busbw_factor

Values = npt.NDArray[np.float32]

COLLECTIVES: Final = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "gather", "scatter",
)  # fmt: skip
PING_PONG, WINDOW, BARRIER = "send_recv", "send_recv_window", "barrier"
POINT_TO_POINT: Final = (PING_PONG, WINDOW)
OPERATIONS: Final = (*COLLECTIVES, *POINT_TO_POINT, BARRIER)

SUMMED: Final = ("all_reduce", "reduce_scatter", "reduce")
ROOTED: Final = ("broadcast", "reduce", "gather", "scatter")
_SHARED: Final = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")

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
    return count // ranks * ranks if op in _SHARED else count


def input_elements(op: str, count: int, ranks: int) -> int:
    """Return the number of elements in the input of a rank that has an input."""
    return count // ranks if op in ("all_gather", "gather") else count


def output_elements(op: str, count: int, ranks: int) -> int:
    """Return the number of elements in the output of a rank that has an output."""
    return count // ranks if op in ("reduce_scatter", "scatter") else count


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
        op: One of OPERATIONS.
        values: `rank_values` of the whole payload.
        rank: The rank.
        ranks: Number of ranks of the group.
    """
    share = len(values) // ranks
    own_share = values[rank * share : (rank + 1) * share]
    if op in ("reduce", "gather") and rank:
        return None
    if op in SUMMED:
        summed = own_share if op == "reduce_scatter" else values
        return (summed * ranks + ranks * (ranks - 1) / 2).astype(np.float32)
    if op in ("broadcast", "scatter"):
        return values if op == "broadcast" else own_share
    if op in ("all_gather", "gather", "all_to_all"):
        sent = own_share if op == "all_to_all" else values[:share]
        return np.concatenate([sent + other for other in range(ranks)])
    return values + (1 - rank) if op == PING_PONG or (op == WINDOW and rank) else None
