"""Measure collectives and messages, like nccl-tests and the OSU benchmarks.

`commtrace bench --nproc 2` starts two ranks on this machine. Under torchrun
(--no-python), srun or mpiexec, each process is a rank. The command measures a
range of payloads, prints tables, and writes them with the machine and the
library versions to a JSON file for `commtrace report --network FILE` and
`commtrace theory --network FILE`. For each operation and group size, it fits
latency and bandwidth, piecewise linear over one to five ranges of payloads,
and prints the held-out errors of the fits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .option_types import add_shared, add_timeout, payload_bytes, positive_integer, positive_integers, positive_number


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add = parser.add_argument
    add("--nproc", metavar="N", type=positive_integer, help="number of ranks to start on this machine")
    add("--through", choices=("torch", "mpi4py"), default="torch", help="library to measure (default: %(default)s)")
    add("--backend", choices=("gloo", "mpi", "nccl"), default="gloo",
        help="backend of torch.distributed (default: %(default)s)")  # fmt: skip
    add("--operations", metavar="OP,...", help="names of the operations to measure (default: all)")
    add("--min-bytes", metavar="N", type=payload_bytes, default="4", help="smallest payload (default: %(default)s)")
    add("--max-bytes", metavar="N", type=payload_bytes, default="64m",
        help="largest payload; k, m, g are powers of 1024 (default: %(default)s)")  # fmt: skip
    add("--group-sizes", metavar="N,...", type=positive_integers, default=(),
        help="also measure collectives among the first N ranks, for each N")  # fmt: skip
    add("--seconds", metavar="SECONDS", type=positive_number, default=0.2,
        help="time to spend on one operation and payload (default: %(default)s)")  # fmt: skip
    help_text = "fail if one call (with mpi4py: all calls of one operation and payload together) takes longer"
    add_timeout(parser, 300, help_text)
    add("--format", choices=("auto", "nccl", "osu"), default="auto", dest="form",
        help="print tables like nccl-tests or the OSU benchmarks (default: nccl for torch's collectives, else "
        "osu)")  # fmt: skip
    add_shared(parser, "--width")
    add("--out", metavar="FILE", default="network.json", help="file for the results (default: %(default)s)")
    add_shared(parser, "--force")
    add(
        "--show",
        metavar="FILE",
        help="measure nothing; print the tables and fits of a results file, or of nccl-tests' or OMB's output",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark, or print the results file of --show."""
    from dataclasses import fields

    from commtrace.launchers import is_launched
    from commtrace.network import NetworkError
    from commtrace.network.bench_operations import BENCH_OPERATIONS
    from commtrace.network.bench_plan import BenchPlan, select_operations
    from commtrace.network.bench_ranks import run_rank, start_ranks

    if arguments.show is not None:
        from commtrace.network.bench_results import read_results
        from commtrace.network.bench_text import results_lines

        print(*results_lines(read_results(Path(arguments.show)), arguments.form, arguments.width), sep="\n")
        return 0
    if arguments.min_bytes > arguments.max_bytes:
        raise NetworkError(f"--min-bytes {arguments.min_bytes} is more than --max-bytes {arguments.max_bytes}")
    plan = BenchPlan(
        operations=select_operations(arguments.operations.split(",") if arguments.operations else BENCH_OPERATIONS),
        **{field.name: vars(arguments)[field.name] for field in fields(BenchPlan) if field.name != "operations"},
    )
    if Path(plan.out).exists() and not plan.force:
        raise NetworkError(f"{plan.out}: already exists; choose another --out or pass --force")
    if arguments.nproc is not None:
        start_ranks(plan, arguments.nproc)
        return 0
    if plan.through == "torch" and not is_launched():
        raise NetworkError("no ranks to measure; give --nproc 2, or start under torchrun, srun or mpiexec")
    return run_rank(plan)
