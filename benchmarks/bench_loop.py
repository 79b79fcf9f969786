"""`commtrace bench` beside a loop written by hand, on two ranks; and how well its fit predicts sizes it never saw.

The loop is what one writes: some calls, a barrier, the clock, many calls, the clock, the slowest rank; ten times, and
the mean. Loop, loop again and bench are measured in turn, each for as long as the others (a longer mean has more of a
machine's rare long calls in it, and gloo's threads, which are more than the cores, fall into other patterns the longer
no barrier ends them), so that the control shows what the same thing differs by in the same minutes. Then bench measures
powers of two, and the loop sizes between them, half as large again as each, in turn; a fit of the former predicts the
latter, as the median of blocks, which is what is fitted. Its errors stand beside what the fit says of itself, and
beside how far apart medians of every other pass are: no fit can be closer to what varies than it is to itself.

All of it over gloo, and over MPI by mpi4py, whose ranks are bound to a core each, as bench binds those it starts.
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

from commtrace.network.bench_ranks import bind_to_core
from commtrace.network.bench_torch import TorchBenchGroup
from commtrace.network.fit import fit
from commtrace.network.measuring import ROUNDS, BenchBuffers, BenchGroup, measure
from commtrace.network.measuring import BenchRow as Measured
from commtrace.network.operations import ELEMENT_BYTES, PING_PONG, payload_elements, payload_sizes

NAME = "commtrace bench"
OPERATIONS = ("all_reduce", "all_gather", PING_PONG)
SIZES = (8, 4 << 10, 256 << 10, 4 << 20)
WARM = 2  # calls before those that count, of the loop

Call = Callable[[], object]


def main() -> None:
    """Measure both, over both."""
    parser = results.parser(__doc__, pairs=18)
    parser.add_argument("--seconds", type=float, default=0.2, help="of one measurement; bench's --seconds (0.2)")
    parser.add_argument("--passes", type=int, default=7, help="over all sizes, for the fit, 2 or more (7)")
    parser.add_argument("--max-bytes", type=int, default=64 << 20, help="largest size, for the fit (64 MiB)")
    options = results.parsed(parser, seconds=0.001, passes=2, max_bytes=1 << 10)
    rows: list[Row] = []
    if not mpi_groups.inside():
        with groups.sleepless():
            rows += groups.run(over_gloo, options, backend="gloo", bound=False)
    results.write("bench_loop", rows + mpi_groups.run(over_mpi, options), options)


class Network(ABC):
    """What one writes a loop with, and what bench has of the same ranks."""

    name: str
    group: BenchGroup

    def __init__(self, most: int) -> None:
        self.memory = BenchBuffers(self.group, most)  # bench's

    @abstractmethod
    def call(self, op: str, count: int) -> Call:
        """By hand, on so many elements (nccl-tests' size)."""

    @abstractmethod
    def barrier(self) -> None:
        """Of all ranks."""

    @abstractmethod
    def slowest(self, seconds: float) -> float:
        """Of all ranks."""

    def ping_pong(self, send: Callable[[int], object], recv: Callable[[int], object]) -> Call:
        """There and back, by what sends to a rank and what receives from one."""
        other = 1 - self.group.rank

        def first() -> None:
            send(other)
            recv(other)

        def second() -> None:
            recv(other)
            send(other)

        return second if self.group.rank else first

    def shown(self, row: Row) -> Row:
        """A row that rank 0 has printed."""
        if self.group.rank == 0:
            results.show(row)
        return row


class Gloo(Network):
    """torch.distributed."""

    name = "gloo"

    def __init__(self, most: int) -> None:
        self.group = TorchBenchGroup(dist.group.WORLD, torch.device("cpu"))
        self._given, self._taken = torch.zeros(most // ELEMENT_BYTES), torch.zeros(most // ELEMENT_BYTES)
        super().__init__(most)

    def call(self, op: str, count: int) -> Call:
        """See Network."""
        given, taken = self._given[:count], self._taken[:count]
        if op == "all_reduce":
            return partial(dist.all_reduce, taken)
        if op == "all_gather":
            # Its name from torch 2.13 on, and the one before.
            all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return partial(all_gather, taken, given[: count // 2])
        return self.ping_pong(partial(dist.send, given), partial(dist.recv, taken))

    def barrier(self) -> None:
        """See Network."""
        dist.barrier()

    def slowest(self, seconds: float) -> float:
        """See Network."""
        return groups.over_ranks(seconds, dist.ReduceOp.MAX)


class Mpi(Network):
    """mpi4py."""

    def __init__(self, most: int) -> None:
        from mpi4py import MPI

        from commtrace.network.bench_mpi import MpiBenchGroup

        self._world: Any = MPI.COMM_WORLD
        self._max = MPI.MAX
        bind_to_core(self._world.Get_rank(), self._world.Get_size())
        self.name, self.group = MPI.get_vendor()[0], MpiBenchGroup(self._world)
        # Of ones: pages of zeros that were never written are one page, which both ranks read.
        self._given, self._taken = (
            np.ones(most // ELEMENT_BYTES, np.float32),
            np.ones(most // ELEMENT_BYTES, np.float32),
        )
        super().__init__(most)

    def call(self, op: str, count: int) -> Call:
        """See Network."""
        given, taken, world = self._given[:count], self._taken[:count], self._world
        if op == "all_reduce":
            return partial(world.Allreduce, given, taken)
        if op == "all_gather":
            return partial(world.Allgather, given[: count // 2], taken)
        return self.ping_pong(partial(world.Send, given), partial(world.Recv, taken))

    def barrier(self) -> None:
        """See Network."""
        self._world.Barrier()

    def slowest(self, seconds: float) -> float:
        """See Network."""
        return float(self._world.allreduce(seconds, self._max))


def over_gloo(options: argparse.Namespace) -> list[Row]:
    """What a rank does."""
    return both(Gloo(most(options)), options)


def over_mpi(options: argparse.Namespace) -> list[Row]:
    """What a rank does."""
    return both(Mpi(most(options)), options)


def most(options: argparse.Namespace) -> int:
    """Bytes of the largest message."""
    return max(*SIZES, int(options.max_bytes))


def both(network: Network, options: argparse.Namespace) -> list[Row]:
    """Bench beside the loop, and the fit."""
    operations = [op for op in OPERATIONS if options.only in f"{network.name}: {op}"]
    rows = [agreement(network, op, size, options) for op in operations for size in SIZES]
    return [*rows, *(row for op in operations for row in held_out(network, op, options))]


def agreement(network: Network, op: str, size: int, options: argparse.Namespace) -> Row:
    """Loop, loop again and bench."""
    loops = partial(by_hand, network, op, size, options.seconds)
    rounds = in_turn(loops, lambda: bench(network, op, size, options).avg_us, options.pairs)
    return network.shown(compared(f"{network.name}: {op}, {size:,} bytes", NAME, "us", [Round(*one) for one in rounds]))


def held_out(network: Network, op: str, options: argparse.Namespace) -> list[Row]:
    """Errors of the fit, in percent, at sizes that it was not fitted to, and the error that it says it has."""
    powers = [*payload_sizes(2 * ELEMENT_BYTES, options.max_bytes)]
    between = [size + size // 2 for size in powers[:-1]]
    fitted: dict[int, list[Measured]] = {size: [] for size in powers}
    seen: dict[int, list[float]] = {size: [] for size in between}
    for _ in range(options.passes):
        for power, size in zip(powers, [*between, None], strict=True):
            fitted[power].append(bench(network, op, power, options))
            if size is not None:
                seen[size] += [loop(network, op, size, options.seconds / ROUNDS) for _ in range(ROUNDS)]
    found = fit(op, 2, 1, [sorted(some, key=lambda row: row.median_us)[len(some) // 2] for some in fitted.values()])
    times = {size: statistics.median(some) for size, some in seen.items()}
    payloads = {size: payload_elements(op, size, 2) * ELEMENT_BYTES for size in between}
    errors = sorted(abs(found.time_us(payloads[size]) / time - 1) * 100 for size, time in times.items())
    noise = sorted(abs(_every_other_pass(some, 0) / _every_other_pass(some, 1) - 1) * 100 for some in seen.values())
    case = f"{network.name}: {op}, {len(between)} payloads between the fitted ones"
    return [
        network.shown(Row(case, name, "%", value))
        for name, value in (
            ("median error", statistics.median(errors)),
            ("90th percentile", _of_nine_in_ten(errors)),
            ("worst error", errors[-1]),
            ("median error reported by the fit", 100 * (found.held_out_median or 0.0)),
            ("even against odd passes of the loop: median", statistics.median(noise)),
            ("even against odd passes: 90th percentile", _of_nine_in_ten(noise)),
        )
    ]


def _every_other_pass(blocks: Sequence[float], first: int) -> float:
    """The median of these passes' blocks."""
    return statistics.median(time for at, time in enumerate(blocks) if at // ROUNDS % 2 == first)


def _of_nine_in_ten(values: Sequence[float]) -> float:
    """The largest but for a tenth, of values in order."""
    return values[-1 - len(values) // 10]


def bench(network: Network, op: str, size: int, options: argparse.Namespace) -> Measured:
    """What commtrace bench measures."""
    row = measure(network.group, op, size, 1, options.seconds, network.memory)
    assert row is not None
    assert not row.wrong, row
    return row


def by_hand(network: Network, op: str, size: int, seconds: float) -> float:
    """Microseconds of a call by so many blocks of calls as bench has rounds, in so long, as their mean."""
    return statistics.fmean(loop(network, op, size, seconds / ROUNDS) for _ in range(ROUNDS))


def loop(network: Network, op: str, size: int, seconds: float) -> float:
    """Microseconds of a call, of the slower rank, over so long; of a ping-pong, of one way."""
    call = network.call(op, payload_elements(op, size, 2))
    timed(network, call, WARM)
    calls = max(2, round(seconds / timed(network, call, WARM)))
    return timed(network, call, calls) * (0.5 if op == PING_PONG else 1.0) * 1e6


def timed(network: Network, call: Call, calls: int) -> float:
    """Seconds of one of so many, of the slower rank."""
    network.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return network.slowest((time.perf_counter() - begin) / calls)


if __name__ == "__main__":
    main()
