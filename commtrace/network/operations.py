"""What is measured, and the sizes of its buffers: nccl-tests' conventions (its doc/PERFORMANCE.md), in elements.

The payload of an operation is the size that `commtrace.volume` documents, so that rows of a measurement and calls in a
log are about the same bytes. A share is the payload divided among the ranks.

| operation | a rank gives | a rank takes | payload |
| --- | --- | --- | --- |
| all_reduce, broadcast, reduce | payload | payload | the buffer |
| all_gather, gather | share | payload | all shares |
| reduce_scatter, scatter | payload | share | all shares |
| all_to_all | payload | payload | the send buffer |
| send_recv | message | message | a message there and back; half of the time counts (osu_latency) |
| send_recv_window | message | message | many messages one way, then an answer; one message's part counts (osu_bw) |
| barrier | | | none |
"""

from __future__ import annotations

from collections.abc import Iterator
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
"""Bytes of an element: all that is measured is float32, as nccl-tests' default is."""

WINDOW_MESSAGES: Final = 64
"""Messages in flight, osu_bw's default."""
_WINDOW_BYTES: Final = 64 << 20

_PERIOD: Final = 251
"""Of the values in a buffer: a prime, so that a share in the wrong place is seen."""


def payload_elements(op: str, payload: int, ranks: int) -> int:
    """Elements of the largest payload up to `payload` bytes that all ranks have equal shares of; 0: there is none."""
    count = payload // ELEMENT_BYTES
    return count // ranks * ranks if op in _SHARED else count


def input_elements(op: str, count: int, ranks: int) -> int:
    """Elements that a rank (of those that give anything) hands in."""
    return count // ranks if op in ("all_gather", "gather") else count


def output_elements(op: str, count: int, ranks: int) -> int:
    """Elements that a rank (of those that get anything) gets."""
    return count // ranks if op in ("reduce_scatter", "scatter") else count


def bus_bytes(op: str, payload: Any, ranks: int) -> Any:
    """Bytes that busbw is counted of (`commtrace.volume`): what passes the busiest rank, whatever the algorithm.

    A time of latency + these bytes / bandwidth has the same bandwidth for every number of ranks, in an ideal network.
    """
    factor = busbw_factor("send" if op in POINT_TO_POINT else op, ranks)
    return payload * (factor if factor is not None else 1.0)


def payload_sizes(least: int, most: int) -> Iterator[int]:
    """Powers of two times `least`, up to `most`, in bytes."""
    while least <= most:
        yield least
        least *= 2


def window_messages(payload: int) -> int:
    """Messages in flight: osu_bw's 64, fewer of large ones, as their bandwidth shows with fewer."""
    return max(2, min(WINDOW_MESSAGES, _WINDOW_BYTES // max(payload, 1)))


# --- values that show whether data arrived --------------------------------------------------------------------------


def rank_values(count: int) -> Values:
    """What rank 0 gives; rank r adds r to each value. Sums over ranks are exact in float32."""
    return (np.arange(count) % _PERIOD).astype(np.float32)


def expected_values(op: str, values: Values, rank: int, ranks: int) -> Values | None:
    """What a rank must have got when all ranks gave their values (`rank_values` of the payload); None: nothing.

    The root is rank 0; of two ranks that exchange messages, rank 1 takes and, but for the window, rank 0, too.
    """
    share = len(values) // ranks
    mine = values[rank * share : (rank + 1) * share]
    if op in ROOTED and op not in ("broadcast", "scatter") and rank:
        return None
    if op in ("all_reduce", "reduce"):
        return _total(values, ranks)
    if op == "reduce_scatter":
        return _total(mine, ranks)
    if op == "broadcast":
        return values
    if op in ("all_gather", "gather"):
        return np.concatenate([values[:share] + other for other in range(ranks)])
    if op == "scatter":
        return mine
    if op == "all_to_all":
        return np.concatenate([mine + other for other in range(ranks)])
    if op == PING_PONG or (op == WINDOW and rank):
        return values + (1 - rank)
    return None


def _total(values: Values, ranks: int) -> Values:
    return (values * ranks + ranks * (ranks - 1) / 2).astype(np.float32)
