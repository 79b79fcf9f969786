"""Made-up rows and results of `commtrace bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from commtrace.network.bench_operations import bus_bytes, payload_sizes
from commtrace.network.bench_results import BenchResults
from commtrace.network.measuring import BenchRow

TIMES = ("min_us", "avg_us", "median_us", "max_us", "rank_avg_us", "rank_min_us", "rank_max_us")


def row(**changes: Any) -> BenchRow:
    """Return a row. Default: an all_reduce of 4 bytes among 2 ranks; `us` sets every time (10)."""
    us = changes.pop("us", 10.0)
    defaults = {"op": "all_reduce", "ranks": 2, "hosts": 1, "payload_bytes": 4, "calls": 10, "rounds": 10, "wrong": 0}
    return BenchRow(**{**defaults, **dict.fromkeys(TIMES, us), **changes})


def results(rows: Iterable[BenchRow], **changes: Any) -> BenchResults:
    """Return the results of these rows, as if measured on one host with gloo."""
    bench_rows = tuple(rows)
    defaults = {
        "through": "torch",
        "backend": "gloo",
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "hosts": [{"host": "node17", "ranks": max(bench_row.ranks for bench_row in bench_rows)}],
        "machine": {"cpu": "a processor", "cores": 2, "system": "Linux 6.1"},
        "environment": {},
        "date": "2030-01-02",
        "traced": False,
        "seconds": 0.2,
    }
    return BenchResults(**{**defaults, **changes}, rows=bench_rows)


def ideal(
    op: str, ranks: int, hosts: int = 1, *, alpha: Callable[[int], float] = lambda ranks: 10.0, gb_per_s: float = 1.0
) -> list[BenchRow]:
    """Return the rows of an operation whose latency (us) depends on the number of ranks and whose busbw does not."""
    return [
        row(
            op=op,
            ranks=ranks,
            hosts=hosts,
            payload_bytes=size,
            us=alpha(ranks) + float(bus_bytes(op, size, ranks)) / gb_per_s / 1e3,
        )
        for size in payload_sizes(4 * ranks, 64 << 20)
    ]
