"""Wire bytes and busbw, compared with values calculated by hand."""

from __future__ import annotations

import numpy as np
import pytest

from commtrace.operations import OPERATIONS
from commtrace.volume import busbw_factor, size_bins, wire_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("op", "payload", "local", "group", "expected"),
    [
        ("all_reduce", MIB, 0, 4, 1_572_864),  # 2 * 3/4
        ("all_reduce", MIB, 0, 2, MIB),
        ("all_reduce", MIB, 0, 1, 0),  # nothing leaves the rank
        ("all_gather", 4 * MIB, MIB, 4, 3 * MIB),
        ("reduce_scatter", 4 * MIB, MIB, 4, 3 * MIB),
        ("all_gather", 4_000, 100, 4, 3_900),  # uneven: this rank holds 100 of 4,000 bytes
        ("all_to_all", 4 * MIB, MIB, 4, 3 * MIB),
        ("all_to_all", 1_000, 1_000, 4, 0),  # all of it stays on the rank
        ("broadcast", 1_000, 0, 4, 750),  # on average
        ("reduce", 1_000, 0, 4, 750),
        ("send", 1_000, 0, 2, 1_000),
        ("recv", 1_000, 0, 2, 0),
        ("barrier", 0, 0, 8, 0),
        ("put", 10, 0, 2, 10),
        ("get", 10, 0, 2, 0),
    ],
)
def test_wire_bytes(op: str, payload: int, local: int, group: int, expected: float) -> None:
    assert wire_bytes(op, payload, local, group) == expected


def test_gather_and_scatter_depend_on_the_root() -> None:
    assert wire_bytes("gather", 400, 100, 4, peer_is_self=0) == 100
    assert wire_bytes("gather", 400, 100, 4, peer_is_self=1) == 0
    assert wire_bytes("scatter", 400, 100, 4, peer_is_self=1) == 300
    assert wire_bytes("scatter", 400, 100, 4, peer_is_self=0) == 0


def test_a_message_to_oneself_sends_nothing() -> None:
    assert wire_bytes("send", 100, 0, 4, peer_is_self=1) == 0


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_operation_has_a_rule_and_takes_arrays(op: str) -> None:
    payload = np.array([0, 1 << 10, 1 << 40])
    result = wire_bytes(op, payload, payload // 4, np.array([1, 2, 4]), peer_is_self=np.array([0, 1, 0]))
    expected = [
        wire_bytes(op, int(p), int(p) // 4, n, peer_is_self=r)
        for p, n, r in zip(payload, (1, 2, 4), (0, 1, 0), strict=True)
    ]
    assert result.tolist() == expected


def test_the_sum_over_a_group_is_what_the_group_sends() -> None:
    assert sum(wire_bytes("broadcast", 1_000, 0, 4) for _ in range(4)) == 3_000
    assert sum(wire_bytes("gather", 400, 100, 4, peer_is_self=int(rank == 2)) for rank in range(4)) == 300


def test_an_unknown_operation_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="'teleport'"):
        wire_bytes("teleport", 1, 0, 2)


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 1),
        ("send", 1),
    ],
)
def test_busbw_of_four(op: str, factor: float) -> None:
    assert busbw_factor(op, 4) == factor


def test_a_barrier_has_no_bandwidth() -> None:
    assert busbw_factor("barrier", 4) is None


def test_a_size_bin_is_from_a_power_of_two_to_the_next() -> None:
    sizes = np.array([0, 1, 2, 3, 4096, 8191, (1 << 52) - 1])
    low, below = size_bins(sizes)
    assert low.tolist() == [0, 1, 2, 2, 4096, 4096, 1 << 51]
    assert below.tolist() == [1, 2, 4, 4, 8192, 8192, 1 << 52]
    assert ((low <= sizes) & (sizes < below)).all()
