"""Measurement of an operation: sizes, checks of the received values, rounds and statistics, on a simulated clock."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from commtrace.network import NetworkError
from commtrace.network.bench_operations import (
    BENCH_OPERATIONS,
    Values,
    bus_bytes,
    expected_values,
    input_elements,
    output_elements,
    payload_elements,
    payload_sizes,
    rank_values,
    window_messages,
)
from commtrace.network.bench_plan import BenchPlan, select_operations
from commtrace.network.bench_ranks import abort_after, bind_to_core, check_memory, first_host, operations_by_group
from commtrace.network.measuring import BenchBuffers, BenchGroup, BenchRow, Call, measure


class SimulatedRank(BenchGroup):
    """Rank `rank` of `size` with simulated peers and clock; a call takes `call_us`, and a barrier 1 s.

    `damage` changes the result of every call; `others` are the times of all ranks as factors of this rank's.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 4,
        call_us: Callable[[str, int], float] = lambda op, calls: 10.0,
        damage: Callable[[Values], None] = lambda values: None,
        others: Sequence[float] = (),
    ) -> None:
        self.rank, self.size, self._us, self._damage = rank, size, call_us, damage
        self._others = others or (1.0,) * size
        self.now, self.barriers, self.calls = 0.0, 0, 0

    def clock(self) -> float:
        return self.now

    def buffer(self, count: int) -> Values:
        return np.zeros(count, np.float32)

    def fill(self, buffer: Values, values: Values) -> None:
        buffer[:] = values

    def values(self, buffer: Values) -> Values:
        return buffer

    def settle(self) -> None:
        pass

    def barrier(self) -> None:
        self.barriers += 1
        self.now += 1.0  # must not be in any measured time

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return [[value * factor for value in values] for factor in self._others]

    def call(self, op: str, source: Values, result: Values, messages: int) -> Call:
        def call_once() -> None:
            self.calls += 1
            self.now += self._us(op, self.calls) * 1e-6
            if source.any() or result.any():
                right = _moved(op, self.rank, self.size, source, result)
                if right is not None:
                    result[:] = right
                    self._damage(result)

        return call_once


def _moved(op: str, rank: int, size: int, source: Values, result: Values) -> Values | None:
    """Return what this rank receives, from the definition of the operation and not from `expected_values`."""
    count = len(result) if op == "broadcast" else max(len(source), len(result))
    values = (np.arange(count) % 251).astype(np.float32)
    inputs = [values + other for other in range(size)]
    share = count // size
    if op in ("all_reduce", "reduce", "reduce_scatter"):
        total: Values = np.sum(inputs, axis=0, dtype=np.float32)
        if op == "reduce" and rank:
            return None
        return total[rank * share : (rank + 1) * share] if op == "reduce_scatter" else total
    if op in ("all_gather", "gather"):
        return None if op == "gather" and rank else np.concatenate([data[:share] for data in inputs])
    if op == "all_to_all":
        return np.concatenate([data[rank * share : (rank + 1) * share] for data in inputs])
    if op == "scatter":
        return inputs[0][rank * share : (rank + 1) * share]
    if op == "broadcast":
        return inputs[0]
    return None if op == "send_recv_window" and not rank else inputs[1 - rank]


def measured(
    group: BenchGroup, op: str, size: int, hosts: int, seconds: float, clock: Callable[[], float]
) -> BenchRow | None:
    return measure(group, op, size, hosts, seconds, BenchBuffers(group, size), clock)


def ranks_of(op: str) -> int:
    return 2 if op.startswith("send_recv") else 3


@pytest.mark.parametrize("op", BENCH_OPERATIONS)
def test_right_data_is_right_and_wrong_data_is_counted(op: str) -> None:
    size = ranks_of(op)

    def row_of(rank: int, **options: Any) -> BenchRow | None:
        group = SimulatedRank(rank, size, **options)
        return measured(group, op, 3 * 4 * 1000, 1, 0.001, group.clock)

    for rank in range(size):
        row = row_of(rank)
        assert row is not None
        assert row.wrong == 0, (op, rank)

    def spoil(values: Values) -> None:
        values[0] += 1
        values[-1] = 0.5

    counts = [row_of(rank, damage=spoil) for rank in range(size)]
    wrong_counts = [0 if row is None else row.wrong for row in counts]
    checked = (
        [expected_values(op, rank_values(3000), rank, size) is not None for rank in range(size)]
        if op != "barrier"
        else [False] * size
    )
    # The simulated `gather` returns this rank's count for every rank.
    assert wrong_counts == [2 * size * is_checked for is_checked in checked]


def test_a_share_in_the_wrong_place_is_seen() -> None:
    def swap(values: Values) -> None:
        half = len(values) // 2
        values[:] = np.concatenate([values[half:], values[:half]])

    row = measured(SimulatedRank(0, 4, damage=swap), "all_gather", 1 << 16, 1, 0.001, clock=lambda: 0.0)
    assert row is not None
    assert (row.wrong or 0) > 1000


def test_a_round_is_of_calls_alone_and_of_the_slowest_rank() -> None:
    group = SimulatedRank(0, 2, others=(1.0, 1.5))
    row = measured(group, "all_reduce", 1024, 1, 0.01, clock=group.clock)
    assert row is not None
    assert (row.op, row.ranks, row.payload_bytes, row.rounds) == ("all_reduce", 2, 1024, 10)
    assert row.calls == math.ceil(0.01 / 10 / 15e-6)
    for time in (row.min_us, row.avg_us, row.median_us, row.max_us, row.rank_max_us):
        assert time == pytest.approx(15.0)
    assert row.rank_min_us == pytest.approx(10.0)
    assert row.rank_avg_us == pytest.approx(12.5)
    assert group.barriers == 11  # one for the warm-up, and one before each round


def test_calls_before_the_clock_do_not_count() -> None:
    group = SimulatedRank(0, 2, call_us=lambda op, calls: 1000.0 if calls <= 22 else 10.0)
    row = measured(group, "all_reduce", 1024, 1, 0.01, clock=group.clock)
    assert row is not None
    assert row.max_us == pytest.approx(10.0)


def test_spread_is_of_rounds() -> None:
    slow = 22 + 5 * 3  # with three calls per round, the sixth round is slower
    group = SimulatedRank(0, 2, call_us=lambda op, calls: 100.0 if slow < calls <= slow + 3 else 10.0)
    row = measured(group, "all_reduce", 1024, 1, 3e-4, clock=group.clock)
    assert row is not None
    assert (row.calls, row.rounds) == (3, 10)
    assert (row.min_us, row.median_us, row.max_us) == pytest.approx((10.0, 10.0, 100.0))
    assert row.avg_us == pytest.approx(19.0)


def test_what_is_slow_is_called_a_few_times() -> None:
    group = SimulatedRank(0, 2, call_us=lambda op, calls: 1e6)
    row = measured(group, "all_reduce", 1 << 20, 1, 0.2, clock=group.clock)
    assert row is not None
    assert (row.calls, row.rounds) == (1, 3)


def test_of_a_ping_pong_half_counts_and_of_a_window_one_message() -> None:
    for op, part in (("send_recv", 1 / 2), ("send_recv_window", 1 / 64)):
        group = SimulatedRank(0, 2)
        row = measured(group, op, 4096, 2, 0.01, clock=group.clock)
        assert row is not None
        assert row.hosts == 2
        assert row.avg_us == pytest.approx(10.0 * part)


@pytest.mark.parametrize("op", BENCH_OPERATIONS)
def test_sizes_share_memory_and_nothing_else(op: str) -> None:
    """All sizes use the same memory, without the data that a larger size has left there."""
    addresses: list[tuple[int, int]] = []

    class Watched(SimulatedRank):
        def call(self, op: str, source: Values, result: Values, messages: int) -> Call:
            assert not source.any()
            assert not result.any()
            addresses.append((source.ctypes.data, result.ctypes.data))
            return super().call(op, source, result, messages)

    def spoil(values: Values) -> None:
        values[:] = 3.5

    memory = BenchBuffers(group := Watched(size=ranks_of(op), damage=spoil), 1 << 14)
    for size in (1 << 14, 24, 3 << 10):
        assert measure(group, op, size, 1, 0.001, memory, group.clock) is not None
    assert len(set(addresses)) == 1


def test_a_size_without_equal_shares_is_left_out_or_rounded_down() -> None:
    assert measured(SimulatedRank(0, 4), "all_gather", 12, 1, 0.01, clock=lambda: 0.0) is None
    row = measured(SimulatedRank(0, 3), "all_to_all", 64, 1, 0.001, clock=lambda: 0.0)
    assert row is not None
    assert row.payload_bytes == 60
    assert [payload_elements(op, 64, 3) for op in ("all_reduce", "all_gather", "broadcast")] == [16, 15, 16]


@pytest.mark.parametrize(
    ("op", "gives", "takes"),
    [("all_reduce", 12, 12), ("all_gather", 4, 12), ("reduce_scatter", 12, 4), ("scatter", 12, 4), ("gather", 4, 12)],
)
def test_buffers_have_nccl_tests_sizes(op: str, gives: int, takes: int) -> None:
    assert (input_elements(op, 12, 3), output_elements(op, 12, 3)) == (gives, takes)


def test_bytes_are_those_of_busbw() -> None:
    bytes_by_op = {op: float(bus_bytes(op, 1200, 4)) for op in BENCH_OPERATIONS}
    assert bytes_by_op["all_reduce"] == 1800
    assert bytes_by_op["all_gather"] == bytes_by_op["gather"] == bytes_by_op["all_to_all"] == 900
    assert bytes_by_op["broadcast"] == bytes_by_op["send_recv"] == bytes_by_op["send_recv_window"] == 1200


def test_sizes_are_powers_of_two() -> None:
    assert [*payload_sizes(4, 64 << 20)] == [1 << exponent for exponent in range(2, 27)]
    assert [window_messages(size) for size in (4, 1 << 20, 4 << 20, 64 << 20)] == [64, 64, 16, 2]


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_survives_the_way_to_another_process() -> None:
    plan = BenchPlan(operations=["send_recv", "barrier"], group_sizes=[2, 4], out="a b.json")
    assert BenchPlan(**json.loads(json.dumps(asdict(plan)))) == plan


def test_group_sizes_are_those_that_there_can_be() -> None:
    assert BenchPlan(group_sizes=(4, 2)).groups(8) == [2, 4, 8]
    assert BenchPlan().groups(3) == [3]
    for plan, world in ((BenchPlan(group_sizes=(9,)), 8), (BenchPlan(group_sizes=(1,)), 8), (BenchPlan(), 1)):
        with pytest.raises(NetworkError, match="--"):
            plan.groups(world)


def test_an_unknown_operation_is_said() -> None:
    assert select_operations(["barrier", "all_gather"]) == ("all_gather", "barrier")
    with pytest.raises(NetworkError, match="no operation alltoall; choose from all_reduce"):
        select_operations(["alltoall"])


def test_messages_are_measured_within_a_host_and_between_two() -> None:
    plan = BenchPlan(operations=("all_reduce", "send_recv"), group_sizes=(2,))
    assert operations_by_group(plan, ["a", "a", "b", "b"]) == {
        (0, 1): ["all_reduce", "send_recv"],
        (0, 1, 2, 3): ["all_reduce"],
        (0, 2): ["send_recv"],
    }
    assert operations_by_group(BenchPlan(operations=("send_recv",)), ["a"] * 3) == {(0, 1): ["send_recv"]}


def test_more_memory_than_there_is_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    import commtrace.network.bench_ranks as module

    monkeypatch.setattr(module, "_available_bytes", lambda: 1 << 30)
    check_memory(BenchPlan(), 2)
    with pytest.raises(NetworkError, match=r"3 ranks of a host need 1,152 MiB .* 1,024 MiB are available.*--max-bytes"):
        check_memory(BenchPlan(), 3)


def test_ranks_have_a_core_each_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[set[int]] = []
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {3, 5, 8})
    monkeypatch.setattr("os.sched_setaffinity", lambda process, cores: bound.append(cores))
    for rank in range(3):
        bind_to_core(rank, 3)
    assert bound == [{3}, {5}, {8}]
    bind_to_core(3, 4)
    assert len(bound) == 3


def test_what_takes_too_long_is_aborted_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    aborted = threading.Event()
    with abort_after(0.001, "all_reduce of 64 bytes", aborted.set):
        assert aborted.wait(20)
    assert capsys.readouterr().err == "commtrace: all_reduce of 64 bytes: not complete after 0.001 s (--timeout)\n"
    for seconds in (None, 1000.0):
        with abort_after(seconds, "it", pytest.fail):
            pass


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node[03-07,12],login1", "node03"), ("node17", "node17"), ("a1,b2", "a1"), ("x[1-2]-ib", "x1-ib")],
)
def test_the_first_host_of_slurm(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
