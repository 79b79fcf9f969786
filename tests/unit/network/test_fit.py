"""The fit: exact for exact data, robust against noise and outliers, with an error for sizes it has not fitted."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
from networks import row

from commtrace.network.bench_operations import bus_bytes, payload_sizes
from commtrace.network.fit import fit, fit_operations
from commtrace.network.measuring import BenchRow


def rows(
    time: Callable[[int], float], op: str = "all_reduce", ranks: int = 2, most: int = 64 << 20, noise: float = 0.0
) -> list[BenchRow]:
    rng = random.Random(7)
    sizes = payload_sizes(4 * ranks, most)
    return [
        row(op=op, ranks=ranks, payload_bytes=size, us=time(size) * (1 + rng.uniform(-noise, noise))) for size in sizes
    ]


@pytest.mark.parametrize(("op", "ranks"), [("all_reduce", 4), ("all_gather", 8), ("broadcast", 3), ("send_recv", 2)])
def test_a_straight_line_is_found_exactly(op: str, ranks: int) -> None:
    alpha, bandwidth = 37.5, 2.5  # us, GB/s of busbw
    fitted = fit(op, ranks, 1, rows(lambda size: alpha + bus_bytes(op, size, ranks) / bandwidth / 1e3, op, ranks))
    assert len(fitted.pieces) == 1
    assert fitted.latency_us == pytest.approx(alpha)
    assert fitted.busbw_gb_per_s == pytest.approx(bandwidth)
    assert fitted.held_out_worst == pytest.approx(0, abs=1e-6)
    assert fitted.time_us(12_345) == pytest.approx(alpha + bus_bytes(op, 12_345, ranks) / bandwidth / 1e3)


def test_small_messages_count_as_much_as_large_ones() -> None:
    """With absolute residuals, only the largest would count: 64 MiB takes 30,000 times as long as 4 B."""
    fitted = fit("all_reduce", 2, 1, rows(lambda size: 2.0 + size / 1e3, noise=0.05))
    assert fitted.latency_us == pytest.approx(2.0, rel=0.05)
    assert fitted.busbw_gb_per_s == pytest.approx(1.0, rel=0.05)
    assert fitted.held_out_worst is not None
    assert fitted.held_out_worst < 0.12


def test_a_size_that_stands_apart_does_not_bend_the_fit() -> None:
    bench_rows = rows(lambda size: 20.0 + size / 2e3, noise=0.02)
    bench_rows[5] = row(payload_bytes=bench_rows[5].payload_bytes, us=bench_rows[5].median_us * 8)
    fitted = fit("all_reduce", 2, 1, bench_rows)
    assert len(fitted.pieces) == 1
    assert fitted.latency_us == pytest.approx(20.0, rel=0.06)
    assert fitted.busbw_gb_per_s == pytest.approx(2.0, rel=0.04)
    assert fitted.held_out_worst_bytes == bench_rows[5].payload_bytes
    assert fitted.held_out_worst == pytest.approx(7 / 8, abs=0.02)  # the outlier is reported, not left out


def test_a_protocol_switch_makes_pieces_when_the_held_out_error_says_so() -> None:
    def switching(size: int) -> float:
        return 5.0 + size / 4e3 if size < 64 << 10 else 60.0 + size / 10e3

    fitted = fit("all_reduce", 2, 1, rows(switching, noise=0.02))
    assert [piece.from_bytes for piece in fitted.pieces] == [8, 64 << 10]
    assert fitted.latency_us == pytest.approx(5.0, rel=0.05)
    assert fitted.busbw_gb_per_s == pytest.approx(10.0, rel=0.05)
    assert fitted.held_out_median is not None
    assert fitted.held_out_median < 0.03
    straight = fit("all_reduce", 2, 1, rows(lambda size: 5.0 + size / 4e3, noise=0.02))
    assert len(straight.pieces) == 1


def test_what_no_line_fits_is_corrected_at_the_measured_sizes() -> None:
    """A rate limiter lets bursts of 64 KiB pass at once."""

    def limited(size: int) -> float:
        return 300.0 + size / 2e3 + max(size - (64 << 10), 0) / 12.5

    most = 8 << 20
    fitted = fit("broadcast", 2, 1, rows(limited, "broadcast", most=most, noise=0.01))
    assert fitted.corrections
    for size in (1 << 20, 3 << 19, 2 << 20, 3 << 20, 4 << 20, 6 << 20, most):
        assert fitted.time_us(size) == pytest.approx(limited(size), rel=0.04)
    assert fitted.time_us(4 * most) == pytest.approx(4 * limited(most), rel=0.05)


def test_sizes_that_noise_alone_corrects_are_few() -> None:
    errors: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(10):
        rng = random.Random(seed)
        bench_rows = [
            row(payload_bytes=size, us=(30 + size / 1e3) * rng.lognormvariate(0, 0.05))
            for size in payload_sizes(4, 64 << 20)
        ]
        fitted = fit("all_reduce", 2, 1, bench_rows)
        assert sum(ratio != 1 for _, ratio in fitted.corrections) <= 4, seed
        for kept, one in ((True, fitted), (False, replace(fitted, corrections=()))):
            errors[kept] += [abs(one.time_us(size) / (30 + size / 1e3) - 1) for size in payload_sizes(4, 64 << 20)]
    assert statistics.mean(errors[True]) < statistics.mean(errors[False]) + 0.005


def test_noise_alone_makes_no_pieces() -> None:
    for seed in range(5):
        rng = random.Random(seed)
        bench_rows = [
            row(payload_bytes=size, us=(30 + size / 1e3) * rng.lognormvariate(0, 0.1))
            for size in payload_sizes(4, 64 << 20)
        ]
        assert len(fit("all_reduce", 2, 1, bench_rows).pieces) == 1, seed


def test_held_out_sizes_are_predicted_as_well_as_is_said() -> None:
    """At sizes between the fitted ones, the error is not much larger than the held-out error."""

    def real(size: int) -> float:
        return 12.0 + size / 3e3 if size < 1 << 20 else 80.0 + size / 2e3

    fitted = fit("all_reduce", 2, 1, rows(real, noise=0.03))
    assert fitted.held_out_median is not None
    between = [abs(fitted.time_us(3 * size // 2) / real(3 * size // 2) - 1) for size in payload_sizes(4, 32 << 20)]
    assert sorted(between)[len(between) // 2] < 2 * fitted.held_out_median + 0.01
    assert max(between) < 0.2


def test_neither_latency_nor_bandwidth_is_negative() -> None:
    falling = fit("all_reduce", 2, 1, [row(payload_bytes=size, us=100 / (1 + size)) for size in (4, 8, 16, 32)])
    assert falling.pieces[0].beta_us_per_byte == 0
    assert falling.busbw_gb_per_s is None
    steep = fit("all_reduce", 2, 1, [row(payload_bytes=size, us=size**1.5) for size in (4, 8, 16, 32, 64)])
    assert steep.latency_us >= 0


def test_few_sizes_have_a_fit_and_no_error() -> None:
    one_size = fit("barrier", 4, 1, [row(op="barrier", ranks=4, payload_bytes=0, us=33.0)])
    assert (one_size.latency_us, one_size.busbw_gb_per_s, one_size.held_out_worst) == (33.0, None, None)
    assert one_size.time_us(0) == 33.0
    two_sizes = fit("all_reduce", 2, 1, [row(payload_bytes=4, us=10.0), row(payload_bytes=1 << 20, us=110.0)])
    assert two_sizes.time_us(1 << 20) == pytest.approx(110.0)
    assert two_sizes.held_out_worst is None


def test_each_operation_group_and_spread_has_its_own() -> None:
    keys = [(op, *group) for op in ("all_reduce", "broadcast") for group in ((2, 1), (2, 2), (4, 2))]
    bench_rows = [
        row(op=op, ranks=ranks, hosts=hosts, payload_bytes=size) for op, ranks, hosts in keys for size in (4, 8, 16)
    ]
    assert [(fitted.op, fitted.ranks, fitted.hosts) for fitted in fit_operations(bench_rows)] == keys
