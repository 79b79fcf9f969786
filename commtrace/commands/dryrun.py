"""`commtrace dryrun`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

ALL_DISTINCT: Final = "all-distinct"


class Command:
    """Run a training program as any rank of a job of any size, on this machine.

    The program is an ordinary one, unchanged: what torchrun would start on every rank. Each rank that is asked for is
    run here, one after the other, as that rank of N: its tensors have no memory and its collectives go nowhere, and
    what it would have communicated is recorded as in any run. The log is an ordinary one, marked as simulated, without
    times. Operations, sizes, groups, order and lines of code are those of the real job; what a program does with
    numbers that it computes is not, and each line of it that looks at such numbers is named.

        commtrace dryrun --world-size 1024 --ranks 0,1023 --out logs/dry python train.py --zero-stage 3
        commtrace report logs/dry
        commtrace check logs/dry

    `--ranks all-distinct` finds the ranks that differ, runs only those, and notes which others each stands for; the
    report then says what the whole job communicates.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument("--world-size", metavar="N", type=_positive, required=True, help="ranks of the job")
        parser.add_argument(
            "--ranks", metavar="LIST", default="0", help=f"which to run: 0,1,60-63 say, all, or {ALL_DISTINCT} (0)"
        )
        parser.add_argument("--out", metavar="DIR", type=Path, help="where the log goes (commtrace-logs)")
        parser.add_argument(
            "--ranks-per-node", metavar="N", type=_positive, default=8, help="ranks of the job on each of its hosts (8)"
        )
        parser.add_argument(
            "--jobs", metavar="N", type=_positive, help="ranks to run at once (as many as there are cores, 4 at most)"
        )
        parser.add_argument(
            "--limit", metavar="SECONDS", type=_seconds, default=1800.0, help="a rank that takes longer is ended (1800)"
        )
        parser.add_argument("command", metavar="CMD", nargs=argparse.REMAINDER, help="the program and its arguments")

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the ranks, and say what came of it. Raises CommtraceError."""
        from commtrace.dryrun.runs import Request, dry_run

        command: list[str] = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
        return dry_run(
            Request(
                command,
                arguments.world_size,
                arguments.ranks,
                arguments.out,
                arguments.ranks_per_node,
                arguments.jobs,
                arguments.limit,
            )
        )


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds
