"""`commtrace bench`."""

from __future__ import annotations

import argparse
import re
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commtrace.network.plan import BenchPlan


class Command:
    """Measure what the network can do: collectives and messages by size, as nccl-tests and OMB do.

    `commtrace bench --ranks 2` starts its own ranks on this machine. Under torchrun (--no-python), srun or mpiexec each
    process is a rank. The tables are printed, and kept with the machine and the versions in a JSON file, which
    `commtrace report --network FILE` and `commtrace theory --network FILE` use: a latency and a bandwidth are fitted to
    each operation and group size, and beside each fit stands the error of sizes that were held out.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        add = parser.add_argument
        add("--ranks", metavar="N", type=_natural, help="start so many ranks on this machine")
        add("--through", choices=("torch", "mpi4py"), default="torch", help="the library (torch)")
        add("--backend", choices=("gloo", "mpi", "nccl"), default="gloo", help="of torch.distributed (gloo)")
        add("--operations", metavar="OP,...", help="some of them, by name (all)")
        add("--min-bytes", metavar="N", type=_bytes, default=4, help="smallest payload (4)")
        add("--max-bytes", metavar="N", type=_bytes, default=64 << 20, help="largest; k, m, g are powers of 1024 (64m)")
        add("--group-sizes", metavar="N,...", help="collectives among so many of the ranks, beside all of them")
        add("--seconds", metavar="S", type=_positive, default=0.2, help="time for one operation and size (0.2)")
        add(
            "--timeout",
            metavar="S",
            type=_positive,
            default=300.0,
            help="an error if a call takes longer; of MPI, all of a size (300)",
        )
        add("--format", choices=("auto", "nccl", "osu"), default="auto", help="tables as nccl-tests or OMB print them")
        add("--width", metavar="N", type=_natural, help="columns of text (those of the terminal); 130: more is shown")
        add("--out", metavar="FILE", default="network.json", help="where the results are kept (network.json)")
        add("--force", action="store_true", help="replace FILE if it exists")
        add("--show", metavar="FILE", help="measure nothing: the tables and the fit of results that were kept")

    def run(self, arguments: argparse.Namespace) -> int:
        """Measure and print, or only print."""
        from pathlib import Path

        from commtrace.launchers import is_launched
        from commtrace.network import NetworkError, ranks

        if arguments.show is not None:
            from commtrace.network.results import read
            from commtrace.network.tables import lines

            print(*lines(read(Path(arguments.show)), arguments.format, _width(arguments)), sep="\n")
            return 0
        plan = _plan(arguments)
        if Path(plan.out).exists() and not plan.force:
            raise NetworkError(f"{plan.out}: exists already; give another name by --out, or --force to replace it")
        if arguments.ranks is not None:
            ranks.start(plan, arguments.ranks)
            return 0
        if plan.through == "torch" and not is_launched():
            raise NetworkError("say how many ranks to start here: --ranks 2; or start under torchrun, srun or mpiexec")
        return ranks.run_rank(plan)


def _plan(arguments: argparse.Namespace) -> BenchPlan:
    from commtrace.network import NetworkError
    from commtrace.network.operations import OPERATIONS
    from commtrace.network.plan import BenchPlan, chosen

    if arguments.min_bytes > arguments.max_bytes:
        raise NetworkError(f"--min-bytes {arguments.min_bytes} is more than --max-bytes {arguments.max_bytes}")
    names = arguments.operations.split(",") if arguments.operations else OPERATIONS
    groups = tuple(map(_group_size, arguments.group_sizes.split(","))) if arguments.group_sizes else ()
    return BenchPlan(
        through=arguments.through,
        backend=arguments.backend,
        operations=chosen(names),
        min_bytes=arguments.min_bytes,
        max_bytes=arguments.max_bytes,
        group_sizes=groups,
        seconds=arguments.seconds,
        timeout_s=arguments.timeout,
        out=arguments.out,
        force=arguments.force,
        form=arguments.format,
        width=_width(arguments),
    )


def _group_size(text: str) -> int:
    from commtrace.network import NetworkError

    if not text.isdigit():
        raise NetworkError(f"--group-sizes: {text!r} is not a number; give numbers of ranks: 2,4,8")
    return int(text)


def _width(arguments: argparse.Namespace) -> int:
    return int(arguments.width or max(80, shutil.get_terminal_size((80, 24)).columns))


def _natural(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)([kmg]?)", text.lower())
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, as 4, 64k or 1m")
    number = int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[found[2]]
    if number < 4:
        raise argparse.ArgumentTypeError("elements have 4 bytes: a payload has 4 at least")
    return number
