"""`commtrace bench` compared with a hand-written loop on two ranks, and the errors of its fit at held-out payloads.

The loop makes a few untimed calls, enters a barrier, times many calls and takes the slower rank's time; it does so ten
times and takes the mean. The loop, the loop again (the control) and bench are measured in turn, each for the same time:
a longer mean includes more of a machine's rare long calls, and gloo's threads, which outnumber the cores, fall into
other patterns the longer no barrier interrupts them.

For the fit, bench measures powers of two, and the loop measures the sizes 1.5 times as large. The medians of bench are
fitted, and the fit predicts the medians of the loop. Its errors are shown beside those that it reports, and beside the
difference between even and odd passes of the loop: a fit cannot be more accurate than the measurements are repeatable.

All of this runs over gloo and over MPI with mpi4py. MPI ranks are bound to a core each, as bench binds its own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import groups
import mpi_groups
import numpy as np
import results
import torch
import torch.distributed as dist
from measuring import Round, Row, compared, in_turn

from commtrace.network.bench_operations import ELEMENT_BYTES, PING_PONG, payload_elements, payload_sizes
from commtrace.network.bench_ranks import bind_to_core
from commtrace.network.bench_torch import TorchBenchGroup
from commtrace.network.fit import fit
from commtrace.network.measuring import ROUNDS, BenchBuffers, BenchGroup, measure
from commtrace.network.measuring import BenchRow as Measured

NAME = "commtrace bench"
OPERATIONS = ("all_reduce", "all_gather", PING_PONG)
SIZES = (8, 4 << 10, 256 << 10, 4 << 20)
WARM = 2  # untimed calls of the loop

Call = Callable[[], object]


def main() -> None:
    """Run the benchmark over gloo and MPI, and write its results."""
    parser = results.parser(__doc__, pairs=18)
    parser.add_argument("--seconds", type=float, default=0.2, help="seconds per measurement, as in bench (0.2)")
    parser.add_argument("--passes", type=int, default=7, help="passes over all sizes for the fit, 2 or more (7)")
    parser.add_argument("--max-bytes", type=int, default=64 << 20, help="largest size for the fit (64 MiB)")
    options = results.parsed(parser, seconds=0.001, passes=2, max_bytes=1 << 10)
    rows: list[Row] = []
    if not mpi_groups.inside():
        with groups.sleepless():
            rows += groups.run(over_gloo, options, backend="gloo", bound=False)
    results.write("bench_loop", rows + mpi_groups.run(over_mpi, options), options)


class Network(ABC):
    """Calls of a library for the hand-written loop, and bench's group of the same ranks."""

    name: str
    group: BenchGroup

    def __init__(self, max_bytes: int) -> None:
        self.memory = BenchBuffers(self.group, max_bytes)  # for bench

    @abstractmethod
    def call(self, op: str, count: int) -> Call:
        """Return the loop's call on `count` elements (the size as in nccl-tests)."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def slowest(self, seconds: float) -> float:
        """Return the maximum over all ranks."""

    def ping_pong(self, send: Callable[[int], object], recv: Callable[[int], object]) -> Call:
        """Return a call that sends a message to the other rank and receives one, in the reverse order on rank 1."""
        other = 1 - self.group.rank

        def first() -> None:
            send(other)
            recv(other)

        def second() -> None:
            recv(other)
            send(other)

        return second if self.group.rank else first

    def shown(self, row: Row) -> Row:
        """Print a row on rank 0, and return it."""
        if self.group.rank == 0:
            results.show(row)
        return row


class Gloo(Network):
    """torch.distributed."""

    name = "gloo"

    def __init__(self, max_bytes: int) -> None:
        self.group = TorchBenchGroup(dist.group.WORLD, torch.device("cpu"))
        self._input, self._output = torch.zeros(max_bytes // ELEMENT_BYTES), torch.zeros(max_bytes // ELEMENT_BYTES)
        super().__init__(max_bytes)

    def call(self, op: str, count: int) -> Call:
        """See Network."""
        input_, output = self._input[:count], self._output[:count]
        if op == "all_reduce":
            return partial(dist.all_reduce, output)
        if op == "all_gather":
            # The name from torch 2.13 on, and the earlier one.
            all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return partial(all_gather, output, input_[: count // 2])
        return self.ping_pong(partial(dist.send, input_), partial(dist.recv, output))

    def barrier(self) -> None:
        """See Network."""
        dist.barrier()

    def slowest(self, seconds: float) -> float:
        """See Network."""
        return groups.over_ranks(seconds, dist.ReduceOp.MAX)


class Mpi(Network):
    """mpi4py."""

    def __init__(self, max_bytes: int) -> None:
        from mpi4py import MPI

        from commtrace.network.bench_mpi import MpiBenchGroup

        self._world: Any = MPI.COMM_WORLD
        self._max = MPI.MAX
        bind_to_core(self._world.Get_rank(), self._world.Get_size())
        self.name, self.group = MPI.get_vendor()[0], MpiBenchGroup(self._world)
        # Ones, because all unwritten pages of zeros map to one page, which both ranks would read.
        self._input, self._output = (
            np.ones(max_bytes // ELEMENT_BYTES, np.float32),
            np.ones(max_bytes // ELEMENT_BYTES, np.float32),
        )
        super().__init__(max_bytes)

    def call(self, op: str, count: int) -> Call:
        """See Network."""
        input_, output, world = self._input[:count], self._output[:count], self._world
        if op == "all_reduce":
            return partial(world.Allreduce, input_, output)
        if op == "all_gather":
            return partial(world.Allgather, input_[: count // 2], output)
        return self.ping_pong(partial(world.Send, input_), partial(world.Recv, output))

    def barrier(self) -> None:
        """See Network."""
        self._world.Barrier()

    def slowest(self, seconds: float) -> float:
        """See Network."""
        return float(self._world.allreduce(seconds, self._max))


def over_gloo(options: argparse.Namespace) -> list[Row]:
    """Return the rows that a rank of gloo measures."""
    return measured(Gloo(largest_message(options)), options)


def over_mpi(options: argparse.Namespace) -> list[Row]:
    """Return the rows that a rank of MPI measures."""
    return measured(Mpi(largest_message(options)), options)


def largest_message(options: argparse.Namespace) -> int:
    """Return the bytes of the largest message."""
    return max(*SIZES, int(options.max_bytes))


def measured(network: Network, options: argparse.Namespace) -> list[Row]:
    """Return the rows of bench and the loop, and those of the fit."""
    operations = [op for op in OPERATIONS if options.only in f"{network.name}: {op}"]
    rows = [agreement(network, op, size, options) for op in operations for size in SIZES]
    return [*rows, *(row for op in operations for row in held_out(network, op, options))]


def agreement(network: Network, op: str, size: int, options: argparse.Namespace) -> Row:
    """Compare the loop, the loop again and bench."""
    loops = partial(by_hand, network, op, size, options.seconds)
    rounds = in_turn(loops, lambda: bench(network, op, size, options).avg_us, options.pairs)
    case = f"{network.name}: {op}, {size:,} bytes"
    return network.shown(compared(case, NAME, "us", [Round(*times) for times in rounds]))


def held_out(network: Network, op: str, options: argparse.Namespace) -> list[Row]:
    """Return the errors of the fit at sizes that it was not fitted to, and the error that it reports, in percent."""
    powers = [*payload_sizes(2 * ELEMENT_BYTES, options.max_bytes)]
    between = [size + size // 2 for size in powers[:-1]]
    bench_rows: dict[int, list[Measured]] = {size: [] for size in powers}
    loop_times: dict[int, list[float]] = {size: [] for size in between}
    for _ in range(options.passes):
        for power, size in zip(powers, [*between, None], strict=True):
            bench_rows[power].append(bench(network, op, power, options))
            if size is not None:
                loop_times[size] += [loop(network, op, size, options.seconds / ROUNDS) for _ in range(ROUNDS)]
    medians = [sorted(rows, key=lambda row: row.median_us)[len(rows) // 2] for rows in bench_rows.values()]
    fitted = fit(op, 2, 1, medians)
    payloads = {size: payload_elements(op, size, 2) * ELEMENT_BYTES for size in between}
    errors = sorted(
        abs(fitted.time_us(payloads[size]) / statistics.median(times) - 1) * 100 for size, times in loop_times.items()
    )
    noise = sorted(
        abs(_every_other_pass(times, 0) / _every_other_pass(times, 1) - 1) * 100 for times in loop_times.values()
    )
    case = f"{network.name}: {op}, {len(between)} payloads between the fitted ones"
    return [
        network.shown(Row(case, name, "%", value))
        for name, value in (
            ("median error", statistics.median(errors)),
            ("90th percentile", _percentile_90(errors)),
            ("worst error", errors[-1]),
            ("median error reported by the fit", 100 * (fitted.held_out_median or 0.0)),
            ("even against odd passes of the loop: median", statistics.median(noise)),
            ("even against odd passes: 90th percentile", _percentile_90(noise)),
        )
    ]


def _every_other_pass(blocks: Sequence[float], first: int) -> float:
    """Return the median of the blocks of every other pass, from pass `first` on."""
    return statistics.median(time for index, time in enumerate(blocks) if index // ROUNDS % 2 == first)


def _percentile_90(values: Sequence[float]) -> float:
    """Return the 90th percentile of sorted values."""
    return values[-1 - len(values) // 10]


def bench(network: Network, op: str, size: int, options: argparse.Namespace) -> Measured:
    """Measure as `commtrace bench` does."""
    row = measure(network.group, op, size, 1, options.seconds, network.memory)
    assert row is not None
    assert not row.wrong, row
    return row


def by_hand(network: Network, op: str, size: int, seconds: float) -> float:
    """Return the mean microseconds of a call, over as many blocks as bench has rounds, in `seconds` altogether."""
    return statistics.fmean(loop(network, op, size, seconds / ROUNDS) for _ in range(ROUNDS))


def loop(network: Network, op: str, size: int, seconds: float) -> float:
    """Return the slower rank's microseconds per call, measured for `seconds`; for a ping-pong, of one way."""
    call = network.call(op, payload_elements(op, size, 2))
    timed(network, call, WARM)
    calls = max(2, round(seconds / timed(network, call, WARM)))
    return timed(network, call, calls) * (0.5 if op == PING_PONG else 1.0) * 1e6


def timed(network: Network, call: Call, calls: int) -> float:
    """Return the slower rank's seconds per call over `calls` calls."""
    network.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return network.slowest((time.perf_counter() - begin) / calls)


if __name__ == "__main__":
    main()
