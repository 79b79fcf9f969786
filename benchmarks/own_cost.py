"""Whether commtrace's own measure of its cost is honest: what a report says beside what is seen from outside, in us.

`bare` is what the all_reduce takes more of with commtrace than without, `side` what the report of that very recording
gives as the mean cost of a call.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import groups
import results
import sides
import torch
import torch.distributed as dist
from groups import Amount, Block, Comparison
from measuring import Row, quartiles

from commtrace.run import Run


def main() -> None:
    """Measure both groups."""
    parser = results.parser(__doc__, pairs=24, settle=0.03)
    parser.add_argument("--fake-calls", type=int, default=2000, help="calls of one block on the fake group")
    parser.add_argument("--gloo-calls", type=int, default=200, help="calls of one block on gloo")
    options = results.parsed(parser, fake_calls=100, gloo_calls=20)
    rows = groups.run(on_fake, options, backend="fake") + groups.run(on_gloo, options, backend="gloo")
    results.write("own_cost", rows, options)


def on_fake(options: argparse.Namespace) -> list[Row]:
    """Of the way in alone."""
    return measure("all_reduce, fake group", options.fake_calls, options)


def on_gloo(options: argparse.Namespace) -> list[Row]:
    """Where two ranks share the machine."""
    return measure("all_reduce, two gloo ranks", options.gloo_calls, options)


def measure(case: str, times: int, options: argparse.Namespace) -> list[Row]:
    """Two rows for each recorder: mean, and 99th percentile."""
    reported: dict[str, list[tuple[float, float]]] = {}

    def read(name: str, run: Run, _: Path) -> None:
        reported.setdefault(name, []).append(own_measure(run))

    rows = []
    call = partial(dist.all_reduce, torch.ones(1024))
    for name, switch in sides.commtrace_sides(read=read).items():
        if options.only in name:
            rounds = Comparison(case, name, switch, call).rounds(Amount(times, options.pairs, options.settle))
            rows += [groups.shown(row) for row in side_by_side(case, name, rounds, reported[name])]
    return rows


def own_measure(run: Run) -> tuple[float, float]:
    """Mean and 99th percentile, us, as the report has them."""
    table = run.table("tracing_cost")
    return table["mean_ns"].item() / 1e3, table["p99_ns"].item() / 1e3


def side_by_side(
    case: str, name: str, rounds: Sequence[tuple[Block, Block, Block]], reported: Sequence[tuple[float, float]]
) -> list[Row]:
    """The rows of one recorder. No ratios: what is seen from outside is itself a difference, which may be near zero."""
    outside = [(side.wall - bare.wall) * 1e6 for bare, _, side in rounds]
    means = [mean for mean, _ in reported]
    differences = [mean - seen for mean, seen in zip(means, outside, strict=True)]
    mean = Row(
        case,
        f"{name}: mean",
        "us",
        side=statistics.median(means),
        bare=statistics.median(outside),
        difference=statistics.median(differences),
        control_difference=statistics.median((again.wall - bare.wall) * 1e6 for bare, again, _ in rounds),
        pairs=len(rounds),
        difference_quartiles=quartiles(differences),
    )
    return [mean, Row(case, f"{name}: 99th percentile", "us", side=statistics.median(p99 for _, p99 in reported))]


if __name__ == "__main__":
    main()
