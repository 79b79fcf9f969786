"""What the log says about each call of the program `operators`, whatever the backend."""

from __future__ import annotations

from typing import Any, NamedTuple

from hook_programs.runs import Call
from recorders import FAILED, FAILED_AND_FORGOTTEN, FORGOTTEN, KEPT, POLLED, WAITED

from commtrace.schema import Flag

RANKS = 3
ASYNC, COALESCED, OBJECT, SPARSE, UNEVEN = Flag.ASYNC, Flag.COALESCED, Flag.OBJECT, Flag.SPARSE, Flag.UNEVEN
NONE = Flag(0)


class Row(NamedTuple):
    """Expected values of a call."""

    op: str
    variant: str
    dtype: str | None
    payload: int
    local: int = 0
    flags: Flag = NONE
    peer: int = -1
    tag: int = -1
    reduce_op: str | None = None
    how: str = WAITED
    """What happens to the call, in the terms of docs/explanation/recorders.md."""


def row(call: Call, how: str) -> Row:
    """Return what the log says about a call to which `how` happened."""
    return Row(
        call.op, call.variant, call.dtype, call.payload, call.local, call.flags, call.peer, call.tag, call.reduce_op,
        how,
    )  # fmt: skip


def summed(payload: int, dtype: str = "float32", flags: Flag = NONE, reduce_op: str = "SUM", **other: Any) -> Row:
    """Return the row of an all_reduce."""
    return Row("all_reduce", "allreduce_", dtype, payload, flags=flags, reduce_op=reduce_op, **other)


BARRIER = Row("barrier", "barrier", None, 0)
FLOAT = "float32"

# The same on all ranks.
COMMON: dict[str, list[Row]] = {
    "all_reduce": [summed(400)],
    "all_reduce_asynchronous": [summed(400, flags=ASYNC, reduce_op="MAX")],
    "all_reduce_polled": [summed(400, flags=ASYNC, how=POLLED)],
    "all_reduce_dropped": [summed(28, flags=ASYNC, how=FORGOTTEN), BARRIER],
    "all_reduce_kept": [summed(36, flags=ASYNC, how=KEPT)],
    "all_reduce_coalesced": [
        Row("all_reduce", "allreduce_coalesced_", FLOAT, 4 * (10 + 20), flags=COALESCED, reduce_op="SUM")
    ],
    "coalescing_manager": [
        Row("all_reduce", "allreduce_coalesced_", FLOAT, 4 * (10 + 30), flags=COALESCED, reduce_op="SUM")
    ],
    "all_gather": [Row("all_gather", "allgather_", "bfloat16", 3 * 50 * 2, 50 * 2)],
    "all_gather_into_tensor": [Row("all_gather", "_allgather_base_", FLOAT, 3 * 40 * 4, 40 * 4)],
    "all_gather_coalesced": [
        Row("all_gather", "allgather_into_tensor_coalesced_", FLOAT, 3 * 10 * 4, 10 * 4, flags=COALESCED)
    ],
    "reduce_scatter": [Row("reduce_scatter", "reduce_scatter_", FLOAT, 3 * 11 * 4, 11 * 4, reduce_op="SUM")],
    "reduce_scatter_tensor": [
        Row("reduce_scatter", "_reduce_scatter_base_", FLOAT, 3 * 12 * 4, 12 * 4, reduce_op="MIN")
    ],
    "all_to_all_single": [Row("all_to_all", "alltoall_base_", FLOAT, 3 * 5 * 4, 5 * 4)],
    "all_to_all_empty": [Row("all_to_all", "alltoall_base_", FLOAT, 0)],
    "broadcast": [Row("broadcast", "broadcast_", "bool", 100, peer=2)],
    "reduce": [Row("reduce", "reduce_", "float64", 800, peer=1, reduce_op="SUM")],
    "gather": [Row("gather", "gather_", FLOAT, 3 * 40, 40, peer=1)],
    "scatter": [Row("scatter", "scatter_", FLOAT, 3 * 40, 40, peer=2)],
    "barrier": [BARRIER],
    "monitored_barrier": [Row("barrier", "monitored_barrier_", None, 0)],
    "empty": [summed(0)],
    "inference_mode": [summed(40)],
    "complex_numbers": [summed(80)],  # torch.distributed converts them to pairs of real numbers
    "not_contiguous": [summed(160)],
    "failing": [summed(40, reduce_op="BAND", how=FAILED)],
    "failing_and_dropped": [summed(40, flags=ASYNC, reduce_op="BAND", how=FAILED_AND_FORGOTTEN)],
    "reduce_scatter_dropped": [
        Row("reduce_scatter", "_reduce_scatter_base_", FLOAT, 3 * 8, 8, reduce_op="SUM", flags=ASYNC, how=FORGOTTEN),
        BARRIER,
    ],
    "functional": [summed(40, flags=ASYNC)],
    "functional_coalesced": [
        Row("all_reduce", "allreduce_coalesced_", FLOAT, 120, flags=ASYNC | COALESCED, reduce_op="SUM")
    ],
    "functional_dropped": [summed(24, flags=ASYNC, how=KEPT), BARRIER],
    "functional_of_a_view": [summed(80, flags=ASYNC)],
    "redistribute": [Row("all_gather", "allgather_into_tensor_coalesced_", FLOAT, 3 * 32, 32, flags=ASYNC | COALESCED)],
    "compiled": [summed(100, flags=ASYNC)] * 2,
    "world_again": [summed(12)] * 2,
}

# By rank.
EACH: dict[str, list[list[Row]]] = {
    "all_to_all_uneven": [
        [Row("all_to_all", "alltoall_base_", FLOAT, 20 * rows, 20 * own, flags=flags)]
        # Rank 2 sends equal parts but receives unequal ones.
        for rows, own, flags in ((6, 1, UNEVEN), (5, 0, UNEVEN), (6, 2, UNEVEN))
    ],
    "send_and_recv": [
        [Row("send", "send", FLOAT, 32, peer=1, tag=5)] * 2,
        [Row("recv", "recv_", FLOAT, 32, peer=0, tag=5)] * 2,
        [],
    ],
    "isend_and_irecv": [
        [],
        [Row("send", "send", FLOAT, 32, peer=2, tag=0, flags=ASYNC)],
        [Row("recv", "recv_", FLOAT, 32, peer=1, tag=0, flags=ASYNC)],
    ],
    "batch_isend_irecv": [
        [
            Row("send", "send", FLOAT, 64, peer=(rank + 1) % 3, tag=0, flags=ASYNC),
            Row("recv", "recv_", FLOAT, 64, peer=(rank - 1) % 3, tag=0, flags=ASYNC),
        ]
        for rank in range(RANKS)
    ],
    "recv_from_any": [
        [Row("send", "send", FLOAT, 16, peer=2, tag=0)],
        [],
        [Row("recv", "recv_any_source_", FLOAT, 16, tag=0)],
    ],
    "message_dropped": [
        [Row("send", "send", FLOAT, 36, peer=1, tag=0, flags=ASYNC, how=FORGOTTEN), BARRIER],
        [Row("recv", "recv_", FLOAT, 36, peer=0, tag=0, flags=ASYNC), BARRIER],
        [BARRIER],
    ],
    "message_kept": [
        [Row("send", "send", FLOAT, 36, peer=1, tag=0, flags=ASYNC, how=KEPT), BARRIER],
        [Row("recv", "recv_", FLOAT, 36, peer=0, tag=0), BARRIER],
        [BARRIER],
    ],
    "subgroup": [
        [],
        [Row("broadcast", "broadcast_", FLOAT, 20, peer=2), Row("send", "send", FLOAT, 12, peer=2, tag=0)],
        [Row("broadcast", "broadcast_", FLOAT, 20, peer=2), Row("recv", "recv_", FLOAT, 12, peer=1, tag=0)],
    ],
    # Matrices with one, two and three elements: two int64 indices and a float32 for each element.
    "all_reduce_sparse": [[summed((2 * 8 + 4) * (rank + 1), flags=SPARSE)] for rank in range(RANKS)],
}
OBJECTS = ("all_gather_object", "broadcast_object_list")


def rows(name: str, rank: int) -> list[Row]:
    """Return the expected rows of a case."""
    return COMMON[name] if name in COMMON else EACH[name][rank]
