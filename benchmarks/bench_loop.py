"""`commtrace bench` beside a loop written by hand, on two gloo ranks; and how well its fit predicts sizes it never saw.

The loop is what one writes: some calls, a barrier, the clock, many calls, the clock, the slowest rank. Loop, loop again
and bench are measured in turn, each for as long as the others (a longer mean has more of a machine's rare long calls
in it), so that the control shows what the same thing differs by in the same minutes. Then bench measures powers of
two, and the loop sizes between them, half as large again as each, in turn; a fit of the former predicts the latter, as
the median of blocks, which is what is fitted. Its errors stand beside what the fit says of itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import groups
import results
import torch
import torch.distributed as dist
from measuring import Round, Row, compared, in_turn

from commtrace.network.fit import fit
from commtrace.network.measuring import ROUNDS, measure
from commtrace.network.measuring import Row as Measured
from commtrace.network.operations import ELEMENT, PING_PONG, elements, sizes
from commtrace.network.torch_library import TorchGroup

NAME = "commtrace bench"
OPERATIONS = ("all_reduce", "all_gather", PING_PONG)
SIZES = (8, 4 << 10, 256 << 10, 4 << 20)
WARM = 2  # calls before those that count, of the loop


def main() -> None:
    """Measure both."""
    parser = results.parser(__doc__, pairs=18)
    parser.add_argument("--seconds", type=float, default=0.2, help="of one measurement; bench's --seconds (0.2)")
    parser.add_argument("--passes", type=int, default=5, help="over all sizes, for the fit (5)")
    parser.add_argument("--max-bytes", type=int, default=64 << 20, help="largest size, for the fit (64 MiB)")
    options = results.parsed(parser, seconds=0.001, passes=1, max_bytes=1 << 10)
    results.write("bench_loop", groups.run(both, options, backend="gloo"), options)


def both(options: argparse.Namespace) -> list[Row]:
    """What a rank does."""
    group = TorchGroup(dist.group.WORLD, torch.device("cpu"))
    rows = [agreement(group, op, size, options) for op in OPERATIONS for size in SIZES if options.only in op]
    return [*rows, *(row for op in OPERATIONS if options.only in op for row in held_out(group, op, options))]


def agreement(group: TorchGroup, op: str, size: int, options: argparse.Namespace) -> Row:
    """Loop, loop again and bench."""
    by_hand = partial(loop, op, size, options.seconds)
    rounds = in_turn(by_hand, lambda: bench(group, op, size, options).avg_us, options.pairs)
    return groups.shown(compared(f"{op}, {size:,} bytes", NAME, "us", [Round(*one) for one in rounds]))


def held_out(group: TorchGroup, op: str, options: argparse.Namespace) -> list[Row]:
    """Errors of the fit, in percent, at sizes that it was not fitted to, and the error that it says it has."""
    powers = [*sizes(2 * ELEMENT, options.max_bytes)]
    between = [size + size // 2 for size in powers[:-1]]
    fitted: dict[int, list[Measured]] = {size: [] for size in powers}
    seen: dict[int, list[float]] = {size: [] for size in between}
    for _ in range(options.passes):
        for power, size in zip(powers, [*between, None], strict=True):
            fitted[power].append(bench(group, op, power, options))
            if size is not None:
                seen[size] += [loop(op, size, options.seconds / ROUNDS) for _ in range(ROUNDS)]
    found = fit(op, 2, 1, [sorted(some, key=lambda row: row.median_us)[len(some) // 2] for some in fitted.values()])
    payloads = {size: elements(op, size, 2) * ELEMENT for size in between}
    errors = [abs(found.time_us(payloads[size]) / statistics.median(times) - 1) * 100 for size, times in seen.items()]
    case = f"{op}, {len(between)} sizes between those fitted"
    return [
        groups.shown(Row(case, "median error", "%", statistics.median(errors))),
        groups.shown(Row(case, "of nine in ten at most", "%", sorted(errors)[-1 - len(errors) // 10])),
        groups.shown(Row(case, "worst error", "%", max(errors))),
        groups.shown(Row(case, "median error by the fit itself", "%", 100 * (found.held_out_median or 0.0))),
    ]


def bench(group: TorchGroup, op: str, size: int, options: argparse.Namespace) -> Measured:
    """What commtrace bench measures."""
    row = measure(group, op, size, 1, options.seconds)
    assert row is not None
    assert not row.wrong, row
    return row


def loop(op: str, size: int, seconds: float) -> float:
    """Microseconds of a call, of the slower rank, over so long; of a ping-pong, of one way."""
    call, part = by_hand(op, elements(op, size, 2))
    timed(call, WARM)
    calls = max(2, round(seconds / timed(call, WARM)))
    return timed(call, calls) * part * 1e6


def timed(call: Callable[[], object], calls: int) -> float:
    """Seconds of one of so many, of the slower rank."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return groups.over_ranks((time.perf_counter() - begin) / calls, dist.ReduceOp.MAX)


def by_hand(op: str, count: int) -> tuple[Callable[[], object], float]:
    """A call on `count` elements (nccl-tests' size), and the part of its time that counts."""
    if op == "all_reduce":
        return partial(dist.all_reduce, torch.zeros(count)), 1.0
    if op == "all_gather":
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name from 2.13 on
        return partial(all_gather, torch.zeros(count), torch.zeros(count // 2)), 1.0
    there, back, rank = torch.zeros(count), torch.zeros(count), dist.get_rank()

    def ping_pong() -> None:
        if rank == 0:
            dist.send(there, 1)
            dist.recv(back, 1)
        else:
            dist.recv(back, 0)
            dist.send(there, 0)

    return ping_pong, 0.5


if __name__ == "__main__":
    main()
