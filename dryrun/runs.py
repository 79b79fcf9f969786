"""A dry run from the request to the log: which ranks, their processes, what they left."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from commtrace import settings as all_settings
from commtrace.commands.run import traced
from commtrace.errors import CommtraceError, LogError
from commtrace.reading.log import open_log
from commtrace.settings import Settings

from .command import ALL_DISTINCT
from .memory_limits import obstacle
from .publish import publish
from .ranks import Job, Outcome, simulate

_LAUNCHERS: Final = ("torchrun", "deepspeed", "mpirun", "mpiexec", "srun", "accelerate", "prun", "jsrun")
_LAUNCHER_MODULES: Final = ("torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.runner")
_MOST_AT_ONCE: Final = 4
_LAST_LINES: Final = 25


class DryRunError(CommtraceError):
    """The program cannot be dry-run, or a rank of it failed."""


@dataclass(frozen=True)
class Request:
    """What was asked for."""

    command: Sequence[str]
    world_size: int
    ranks: str
    out: Path | None
    ranks_per_node: int
    jobs: int | None
    limit_seconds: float


def dry_run(request: Request) -> int:
    """Run what is asked for, write the log, print a line a rank. Raises CommtraceError."""
    command = _program(request.command)
    ranks = _ranks(request.ranks, request.world_size)
    problem = obstacle()
    if problem:
        raise DryRunError(problem)
    out = os.path.abspath(request.out or all_settings.DEFAULT_DIRECTORY)
    environment = traced(os.environ, out)
    settings = all_settings.from_environment(environment)
    assert settings is not None
    with tempfile.TemporaryDirectory(prefix="commtrace-dryrun-") as folder:
        job = Job(
            command,
            environment,
            request.world_size,
            request.ranks_per_node,
            time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + "-" + os.urandom(3).hex(),
            Path(folder),
            request.limit_seconds,
            shown=ranks[0],
        )
        at_once = request.jobs or min(_MOST_AT_ONCE, os.cpu_count() or 1)
        outcomes = simulate(job, ranks, at_once, {})
        _check(outcomes)
        for rank in ranks:
            print(_publish(outcomes[rank], Path(out), settings), flush=True)
    print(f"the log of run {job.run} is in {out}")
    return 0


def _program(command: Sequence[str]) -> list[str]:
    """The command with the path of its program. Raises DryRunError for one that starts ranks itself."""
    if not command:
        raise DryRunError("no program given; say what each rank runs: commtrace dryrun --world-size 64 python train.py")
    launcher = Path(command[0]).name
    if launcher in _LAUNCHERS or any(module in command[:4] for module in _LAUNCHER_MODULES):
        raise DryRunError(
            f"{' '.join(command[:3])}: a launcher, which starts ranks itself; give the command that it would start on "
            "each rank, python train.py say"
        )
    program = shutil.which(command[0])
    if program is None:
        raise DryRunError(f"{command[0]}: no such program on PATH; give its path, or python and the script")
    return [program, *command[1:]]


def _ranks(text: str, world_size: int) -> list[int]:
    """ "0,3-5" as numbers, ascending. Raises DryRunError."""
    if text == "all":
        return [*range(world_size)]
    try:
        spans = [[int(end) for end in part.split("-")] for part in text.split(",")]
        found = sorted({rank for span in spans for rank in range(span[0], span[-1] + 1) if len(span) <= 2})
    except ValueError:
        found = []
    if not found:
        raise DryRunError(f"--ranks {text}: not understood; give 0,1,60-63 say, all, or {ALL_DISTINCT}")
    if found[-1] >= world_size:
        raise DryRunError(
            f"--ranks {text}: rank {found[-1]} is not one of {world_size}, which are 0 to {world_size - 1}"
        )
    return found


def _check(outcomes: Mapping[int, Outcome]) -> None:
    """Raises DryRunError where a rank failed."""
    for outcome in outcomes.values():
        if outcome.timed_out:
            raise DryRunError(
                f"rank {outcome.rank} was not done after {outcome.seconds:.0f} s; --limit gives it longer"
            )
        if outcome.status:
            how = f"by signal {-outcome.status}" if outcome.status < 0 else f"with status {outcome.status}"
            output = "".join(f"\n    {line}" for line in _last_lines(outcome.output))
            raise DryRunError(f"rank {outcome.rank} ended {how}; no log was written{output}")


def _last_lines(file: Path) -> Iterator[str]:
    text = file.read_bytes().decode(errors="replace")
    yield from text.splitlines()[-_LAST_LINES:]


def _publish(outcome: Outcome, out: Path, settings: Settings) -> str:
    """Write the log of a rank; what to say of it."""
    took = f"rank {outcome.rank}: {outcome.seconds:.1f} s, {outcome.peak_bytes >> 20:,} MiB"
    try:
        log = open_log(outcome.log)
    except LogError:
        print(f"commtrace: rank {outcome.rank} made no communication call that the hooks saw", file=sys.stderr)
        return f"{took}, no call"
    calls = sum(publish(process, out / log.run / process.path.parent.name, settings) for process in log.processes)
    return f"{took}, {calls:,} calls"
