"""The fit: exact where the data are, robust where they are not, and honest about sizes that it has not seen."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from networks import row

from commtrace.network.fit import fit, fit_operations
from commtrace.network.measuring import BenchRow
from commtrace.network.operations import bus_bytes, payload_sizes


def rows(
    time: Callable[[int], float], op: str = "all_reduce", ranks: int = 2, most: int = 64 << 20, noise: float = 0.0
) -> list[BenchRow]:
    chance = random.Random(7)
    found = payload_sizes(4 * ranks, most)
    return [
        row(op=op, ranks=ranks, payload_bytes=size, us=time(size) * (1 + chance.uniform(-noise, noise)))
        for size in found
    ]


@pytest.mark.parametrize(("op", "ranks"), [("all_reduce", 4), ("all_gather", 8), ("broadcast", 3), ("send_recv", 2)])
def test_a_straight_line_is_found_exactly(op: str, ranks: int) -> None:
    alpha, bandwidth = 37.5, 2.5  # us, GB/s of busbw
    found = fit(op, ranks, 1, rows(lambda size: alpha + bus_bytes(op, size, ranks) / bandwidth / 1e3, op, ranks))
    assert len(found.pieces) == 1
    assert found.latency_us == pytest.approx(alpha)
    assert found.busbw_gb_per_s == pytest.approx(bandwidth)
    assert found.held_out_worst == pytest.approx(0, abs=1e-6)
    assert found.time_us(12_345) == pytest.approx(alpha + bus_bytes(op, 12_345, ranks) / bandwidth / 1e3)


def test_small_messages_count_as_much_as_large_ones() -> None:
    """Absolute residuals would be of the largest alone: 64 MiB takes 30,000 times as long as 4 B."""
    found = fit("all_reduce", 2, 1, rows(lambda size: 2.0 + size / 1e3, noise=0.05))
    assert found.latency_us == pytest.approx(2.0, rel=0.05)
    assert found.busbw_gb_per_s == pytest.approx(1.0, rel=0.05)
    assert found.held_out_worst is not None
    assert found.held_out_worst < 0.12


def test_a_size_that_stands_apart_does_not_bend_the_fit() -> None:
    some = rows(lambda size: 20.0 + size / 2e3, noise=0.02)
    some[5] = row(payload_bytes=some[5].payload_bytes, us=some[5].median_us * 8)
    found = fit("all_reduce", 2, 1, some)
    assert len(found.pieces) == 1
    assert found.latency_us == pytest.approx(20.0, rel=0.06)
    assert found.busbw_gb_per_s == pytest.approx(2.0, rel=0.04)
    assert found.held_out_worst_bytes == some[5].payload_bytes
    assert found.held_out_worst == pytest.approx(7 / 8, abs=0.02)  # it is said, and not left out


def test_a_protocol_switch_makes_pieces_when_the_held_out_error_says_so() -> None:
    def switching(size: int) -> float:
        return 5.0 + size / 4e3 if size < 64 << 10 else 60.0 + size / 10e3

    found = fit("all_reduce", 2, 1, rows(switching, noise=0.02))
    assert [piece.from_bytes for piece in found.pieces] == [8, 64 << 10]
    assert found.latency_us == pytest.approx(5.0, rel=0.05)
    assert found.busbw_gb_per_s == pytest.approx(10.0, rel=0.05)
    assert found.held_out_median is not None
    assert found.held_out_median < 0.03
    straight = fit("all_reduce", 2, 1, rows(lambda size: 5.0 + size / 4e3, noise=0.02))
    assert len(straight.pieces) == 1


def test_noise_alone_makes_no_pieces() -> None:
    for seed in range(5):
        chance = random.Random(seed)
        some = [
            row(payload_bytes=size, us=(30 + size / 1e3) * chance.lognormvariate(0, 0.1))
            for size in payload_sizes(4, 64 << 20)
        ]
        assert len(fit("all_reduce", 2, 1, some).pieces) == 1, seed


def test_held_out_sizes_are_predicted_as_well_as_is_said() -> None:
    """Sizes between those that were fitted, never seen: the error is what the fit claims, and not more."""

    def real(size: int) -> float:
        return 12.0 + size / 3e3 if size < 1 << 20 else 80.0 + size / 2e3

    found = fit("all_reduce", 2, 1, rows(real, noise=0.03))
    assert found.held_out_median is not None
    between = [abs(found.time_us(3 * size // 2) / real(3 * size // 2) - 1) for size in payload_sizes(4, 32 << 20)]
    assert sorted(between)[len(between) // 2] < 2 * found.held_out_median + 0.01
    assert max(between) < 0.2


def test_neither_latency_nor_bandwidth_is_negative() -> None:
    falling = fit("all_reduce", 2, 1, [row(payload_bytes=size, us=100 / (1 + size)) for size in (4, 8, 16, 32)])
    assert falling.pieces[0].beta_us_per_byte == 0
    assert falling.busbw_gb_per_s is None
    steep = fit("all_reduce", 2, 1, [row(payload_bytes=size, us=size**1.5) for size in (4, 8, 16, 32, 64)])
    assert steep.latency_us >= 0


def test_few_sizes_have_a_fit_and_no_error() -> None:
    one = fit("barrier", 4, 1, [row(op="barrier", ranks=4, payload_bytes=0, us=33.0)])
    assert (one.latency_us, one.busbw_gb_per_s, one.held_out_worst) == (33.0, None, None)
    assert one.time_us(0) == 33.0
    two = fit("all_reduce", 2, 1, [row(payload_bytes=4, us=10.0), row(payload_bytes=1 << 20, us=110.0)])
    assert two.time_us(1 << 20) == pytest.approx(110.0)
    assert two.held_out_worst is None


def test_each_operation_group_and_spread_has_its_own() -> None:
    keys = [(op, *group) for op in ("all_reduce", "broadcast") for group in ((2, 1), (2, 2), (4, 2))]
    some = [
        row(op=op, ranks=ranks, hosts=hosts, payload_bytes=size) for op, ranks, hosts in keys for size in (4, 8, 16)
    ]
    assert [(one.op, one.ranks, one.hosts) for one in fit_operations(some)] == keys
