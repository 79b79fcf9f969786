"""Rows of the table of operations, compared with the conventions of nccl-tests, MPI and Scalasca."""

from __future__ import annotations

import pytest

from commtrace.operations import MESSAGES, OPERATIONS, Extent, Flow, Operation, Schedule, operations_where

RANKS = 4
COLLECTIVES = operations_where(lambda operation: not (operation.is_message or operation.is_one_sided))


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=[*OPERATIONS])
def test_a_row_is_complete(operation: Operation) -> None:
    assert operation.wire(1 << 10, 1 << 8, RANKS, 0) >= 0
    assert operation.busbw is None or operation.busbw(RANKS) > 0
    assert (operation.wait_state is None) == (operation.flow in (Flow.PREFIX, Flow.ONE_SIDED))
    assert operation.schedule is None or operation.name in COLLECTIVES
    assert (operation.input is Extent.SPLITS) == (operation.output is Extent.SPLITS)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_ranks_together_send_what_the_others_need(name: str) -> None:
    """A rank lacks what its output holds of other ranks' inputs; a reduction or broadcast sends each byte once more."""
    operation, payload = OPERATIONS[name], 1 << 10
    local = payload // RANKS if operation.has_parts else 0
    sent = sum(operation.wire(payload, local, RANKS, int(rank == 0)) for rank in range(RANKS))
    per_rank = {"all_reduce": 2 * payload * (RANKS - 1), "barrier": 0}
    received = payload * (RANKS - 1) // RANKS if operation.is_rooted and operation.has_parts else payload * (RANKS - 1)
    assert sent == per_rank.get(name, received)


def test_busbw_counts_what_the_busiest_rank_sends() -> None:
    """nccl-tests doc/PERFORMANCE.md; the root of a broadcast or reduction sends or receives the whole payload."""
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"):
        operation = OPERATIONS[name]
        local = 256 if operation.has_parts else 0
        assert operation.busbw is not None
        assert 1024 * operation.busbw(RANKS) == operation.wire(1024, local, RANKS, 0)


def test_groups_of_operations() -> None:
    assert MESSAGES == ("send", "recv")
    assert operations_where(lambda operation: operation.is_rooted) == ("broadcast", "reduce", "gather", "scatter")
    assert {*operations_where(lambda operation: operation.is_one_sided)} == {"put", "get", "accumulate"}
    assert {*operations_where(lambda operation: operation.is_synchronizing)} == {
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier",
    }  # fmt: skip
    assert {*operations_where(lambda operation: operation.schedule is Schedule.DIRECT)} == {
        "all_to_all", "gather", "scatter",
    }  # fmt: skip
