"""The cost of a call that commtrace reports, compared with the cost measured externally, in us.

`bare` is the time that commtrace adds to the all_reduce; `side` is the mean cost of a call in the report of the same
recording.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import groups
import results
import sides
import torch
import torch.distributed as dist
import training_steps
from groups import Amount, Block, Comparison
from measuring import Row, quartiles

from commtrace.run import Run


def main() -> None:
    """Run the benchmark on both groups, and write its results."""
    parser = results.parser(__doc__, pairs=24, settle=0.03)
    parser.add_argument("--fake-calls", type=int, default=2000, help="calls per block on the fake group")
    parser.add_argument("--gloo-calls", type=int, default=200, help="calls per block on gloo")
    parser.add_argument("--cold-calls", type=int, default=60, help="calls after computation per block")
    options = results.parsed(parser, fake_calls=100, gloo_calls=20, cold_calls=60)
    rows = groups.run(on_fake, options, backend="fake") + groups.run(on_gloo, options, backend="gloo")
    results.write("own_cost", rows, options)


def on_fake(options: argparse.Namespace) -> list[Row]:
    """Measure on a fake process group, where nothing is sent: in a loop, and after computation (see `call_cost`)."""
    rows = measure("all_reduce, fake group", options.fake_calls, options)
    return rows + measure(
        "all_reduce after computation, fake group", options.cold_calls, options, training_steps.alone()
    )


def on_gloo(options: argparse.Namespace) -> list[Row]:
    """Measure on two gloo ranks, which share the machine."""
    return measure("all_reduce, two gloo ranks", options.gloo_calls, options)


def measure(
    case: str, times: int, options: argparse.Namespace, before: Callable[[], object] | None = None
) -> list[Row]:
    """Return two rows for each recorder: mean and 99th percentile."""
    reported: dict[str, list[tuple[float, float]]] = {}

    def read(name: str, run: Run, _: Path) -> None:
        reported.setdefault(name, []).append(own_measure(run))

    rows = []
    call = partial(dist.all_reduce, torch.ones(1024))
    for name, switch in sides.commtrace_sides(read=read).items():
        if options.only in name:
            rounds = Comparison(case, name, switch, call, before=before).rounds(
                Amount(times, options.pairs, options.settle)
            )
            rows += [groups.shown(row) for row in side_by_side(case, name, rounds, reported[name])]
    return rows


def own_measure(run: Run) -> tuple[float, float]:
    """Return the reported mean and 99th percentile in us."""
    table = run.table("tracing_cost")
    return table["mean_ns"].item() / 1e3, table["p99_ns"].item() / 1e3


def side_by_side(
    case: str, name: str, rounds: Sequence[tuple[Block, Block, Block]], reported: Sequence[tuple[float, float]]
) -> list[Row]:
    """Return the rows of one recorder. They have no ratio, because the external cost may be near zero."""
    external = [(side.wall - bare.wall) * 1e6 for bare, _, side in rounds]
    means = [mean for mean, _ in reported]
    differences = [mean - cost for mean, cost in zip(means, external, strict=True)]
    mean = Row(
        case,
        f"{name}: mean",
        "us",
        side=statistics.median(means),
        bare=statistics.median(external),
        difference=statistics.median(differences),
        control_difference=statistics.median((again.wall - bare.wall) * 1e6 for bare, again, _ in rounds),
        pairs=len(rounds),
        difference_quartiles=quartiles(differences),
    )
    return [mean, Row(case, f"{name}: 99th percentile", "us", side=statistics.median(p99 for _, p99 in reported))]


if __name__ == "__main__":
    main()
