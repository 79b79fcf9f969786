"""Simulate any rank of a training job of any world size on this machine.

CMD is the unchanged command that torchrun would start on each rank. The ranks
in --ranks run on this machine, one after the other or several at once. Their
tensors are not backed by memory, and their collectives send nothing; the calls
are recorded as in any run. The log is an ordinary log without times, marked as
simulated. Operations, payloads, groups, order and call sites are those of the
real job, unless they depend on values that the program computes. Each line of
the program that reads such a value is reported. Small tensors that another
simulated rank computes and sends are real (integers up to 64 KiB, floats up to
256 bytes). Other small buffers are filled as if every rank had sent the same
values, and large ones are zero; this is not reported.

    commtrace dryrun --world-size 1024 --ranks 0,1023 --out dry python train.py
    commtrace report dry
    commtrace check dry

`--ranks all-distinct` finds the ranks that differ, runs only those, and records
which other ranks each of them represents; the report then shows what the whole
job communicates.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from commtrace.errors import CommtraceError

from .option_types import add_program, add_shared, add_timeout, positive_integer

if TYPE_CHECKING:
    from commtrace.reading.recorded_run import RecordedRun

_TIMEOUT_SECONDS: Final = 1800
_ALL_RANKS: Final = 4
"""Size up to which `repeat` simulates all ranks of a job."""


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add = parser.add_argument
    add_shared(parser, "--world-size")
    add("--ranks", metavar="LIST", default="0",
        help="ranks to run: all, all-distinct, or a list such as 0,1,60-63 (default: %(default)s)")  # fmt: skip
    add("--out", metavar="DIR", type=Path, help="log directory (default: commtrace-logs)")
    add("--ranks-per-node", metavar="N", type=positive_integer, default=8,
        help="ranks per node; sets LOCAL_RANK, LOCAL_WORLD_SIZE and NODE_RANK (default: %(default)s)")  # fmt: skip
    add("--device", choices=("cpu", "cuda"),
        help="device of the program; cuda: simulated (default: cuda if the program requires it)")  # fmt: skip
    add("--writes", choices=("private", "refuse", "allow"), default="private",
        help="what happens to files that the program writes, renames or deletes: private: each rank changes a copy, "
        "which is discarded; refuse: an error, also if the system has no private copies; allow: they are written "
        "(default: %(default)s)")  # fmt: skip
    add("--jobs", metavar="N", type=positive_integer,
        help="number of ranks to run at once, not counting ranks that wait for others (default: number of cores, "
        "at most 4)")  # fmt: skip
    add_timeout(parser, _TIMEOUT_SECONDS, "stop a rank that takes longer")
    add_program(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the ranks and print a line for each.

    Raises:
        CommtraceError: The program cannot be run, or a rank failed.
    """
    from commtrace import settings
    from commtrace.dryrun.dry_run import dry_run
    from commtrace.dryrun.isolation.policy import Writes
    from commtrace.dryrun.rank_processes import DryRunRequest
    from commtrace.process_setup.processor_limits import usable_cores

    from .run import traced

    out = Path(os.path.abspath(arguments.out or settings.DEFAULT_DIRECTORY))
    dry_run(
        DryRunRequest(
            command=arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command,
            environment=traced(os.environ, str(out)),
            world_size=arguments.world_size,
            ranks=arguments.ranks,
            out=out,
            ranks_per_node=arguments.ranks_per_node,
            device=arguments.device,
            jobs=arguments.jobs or min(4, usable_cores()),
            timeout_s=arguments.timeout,
            writes=Writes(arguments.writes),
        )
    )
    return 0


def repeat(command: Sequence[str], run: RecordedRun, out: Path) -> None:
    """Dry-run the program of a recorded run, with as many ranks on as many hosts; only progress is shown.

    Args:
        command: The command that runs on each rank.
        run: The run. A job of more than _ALL_RANKS ranks is simulated by those of them that are distinct.
        out: Directory for the log.

    Raises:
        CommtraceError: The program cannot be run, a rank failed, or the number of ranks is not in the log.
    """
    from commtrace.dryrun.dry_run import ALL_DISTINCT, dry_run
    from commtrace.dryrun.isolation.policy import Writes
    from commtrace.dryrun.rank_processes import DryRunRequest
    from commtrace.process_setup.processor_limits import usable_cores

    from .run import traced

    if run.world_size is None:
        raise CommtraceError(
            f"{run.log.path}: the log does not say how many ranks the run has; make the dry run yourself "
            "(commtrace dryrun --world-size N ...) and compare with --against"
        )
    ranks_by_host = Counter(process.host for process in run.processes)
    with contextlib.redirect_stdout(io.StringIO()):  # the lines of a log that is not kept
        dry_run(
            DryRunRequest(
                command=command,
                environment=traced(os.environ, str(out)),
                world_size=run.world_size,
                ranks="all" if run.world_size <= _ALL_RANKS else ALL_DISTINCT,
                out=out,
                ranks_per_node=max(ranks_by_host.values(), default=run.world_size),
                device=None,
                jobs=min(4, usable_cores()),
                timeout_s=_TIMEOUT_SECONDS,
                writes=Writes.PRIVATE,
                shows_output=False,
            )
        )
