"""A dry run from the request to the log: which ranks, their processes, what they left."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from commtrace import settings as all_settings
from commtrace.commands.run import traced
from commtrace.errors import CommtraceError, LogError
from commtrace.formatting import format_ranks, parse_ranks
from commtrace.reading.log import Log, open_log
from commtrace.reading.run import RecordedRun
from commtrace.recording.log_writer import warn
from commtrace.recording.recovery import recover_records
from commtrace.settings import Settings

from .distinct_ranks import find_distinct
from .memory_limits import memory_obstacle
from .rank_processes import RankOutcome, SimulatedJob, run_ranks
from .simulated_log import write_simulated_log

_LAUNCHERS: Final = ("torchrun", "deepspeed", "mpirun", "mpiexec", "srun", "accelerate", "prun", "jsrun")
_LAUNCHER_MODULES: Final = ("torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.runner")
_MOST_AT_ONCE: Final = 4
ALL_DISTINCT: Final = "all-distinct"
_LAST_LINES: Final = 25

# Columns of the event table in which two ranks that communicate alike are equal.
_ALIKE: Final = (
    "op", "variant", "api", "group_size", "role", "dtype", "payload_bytes", "wire_bytes", "step", "micro_batch",
    "phase", "site", "state", "flags",
)  # fmt: skip


class DryRunError(CommtraceError):
    """The program cannot be dry-run, or a rank of it failed."""


@dataclass(frozen=True)
class DryRunRequest:
    """What was asked for."""

    command: Sequence[str]
    world_size: int
    ranks: str
    out: Path | None
    ranks_per_node: int
    jobs: int | None
    limit_seconds: float


class _RankFailedError(DryRunError):
    """A rank did not end well; `output` are its last lines."""

    def __init__(self, what: str, output: str) -> None:
        super().__init__(what)
        self.output = output


def dry_run(request: DryRunRequest) -> int:
    """Run what is asked for, write the log, print a line a rank. Raises CommtraceError."""
    command = _program(request.command)
    ranks = _ranks(request.ranks, request.world_size)
    out = Path(os.path.abspath(request.out or all_settings.DEFAULT_DIRECTORY))
    problem = memory_obstacle() or _unwritable(out)
    if problem:
        raise DryRunError(problem)
    environment = traced(os.environ, str(out))
    settings = all_settings.from_environment(environment)
    assert settings is not None
    with tempfile.TemporaryDirectory(prefix="commtrace-dryrun-") as folder:
        job = SimulatedJob(
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
        outcomes: dict[int, RankOutcome] = {}

        def run(some: Sequence[int]) -> None:
            _check(run_ranks(job, some, at_once, outcomes))

        try:
            run(ranks)
            alike = _alike(request.world_size, outcomes, run) if request.ranks == ALL_DISTINCT else {}
        except _RankFailedError as error:
            # Of ranks that were found here nobody knows yet for which others they stand.
            whole = [rank for rank in ranks if rank in outcomes and not outcomes[rank].status]
            if request.ranks == ALL_DISTINCT or not whole:
                raise DryRunError(f"{error}; no log was written{error.output}") from None
            where = _publish_all(job, {rank: outcomes[rank] for rank in whole}, out, settings, {})
            raise DryRunError(
                f"{error}; the log of rank{'s' * (len(whole) > 1)} {format_ranks(whole)}, done before, is in {where}"
                f"{error.output}"
            ) from None
        written = _publish_all(job, {rank: outcomes[rank] for rank in sorted(alike) or ranks}, out, settings, alike)
    print(f"the log of run {job.run} is in {written}")
    return 0


def _unwritable(out: Path) -> str:
    """Why no log can be written there; "" where one can be. It is made when there is something to write."""
    there = next(folder for folder in (out, *out.parents) if os.path.lexists(folder))
    if not there.is_dir():
        return f"--out {out}: {there} is not a folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"--out {out}: nothing can be written into {there}; choose another folder"
    return ""


def _publish_all(
    job: SimulatedJob,
    outcomes: Mapping[int, RankOutcome],
    out: Path,
    settings: Settings,
    alike: Mapping[int, Sequence[int]],
) -> Path:
    """Write the logs of ranks and say what each took; returns where they are.

    Where the folder has no room for them they go into one for temporary files: hours of work may be behind them.
    """
    try:
        lines = [_publish(outcome, out, settings, alike.get(rank, ())) for rank, outcome in outcomes.items()]
    except OSError as error:
        shutil.rmtree(out / job.run, ignore_errors=True)
        refuge = Path(tempfile.mkdtemp(prefix="commtrace-logs-"))
        warn(f"{out}: {error.strerror}; the log goes to {refuge}")
        out = refuge
        lines = [_publish(outcome, out, settings, alike.get(rank, ())) for rank, outcome in outcomes.items()]
    print("\n".join(lines), flush=True)
    return out


def _alike(
    world_size: int, outcomes: Mapping[int, RankOutcome], run: Callable[[Sequence[int]], None]
) -> dict[int, list[int]]:
    """The ranks that differ -> the ranks that each stands for. Raises DryRunError."""
    groups = [group for process in _log_of(outcomes[0]).processes for group in process.tables.topology]
    known: dict[int, str] = {}

    def signatures(ranks: Sequence[int]) -> dict[int, str]:
        run(ranks)
        known.update({rank: signature(_log_of(outcomes[rank])) for rank in ranks if rank not in known})
        return known

    return find_distinct(world_size, groups, signatures)


def signature(log: Log) -> str:
    """What a rank communicates, whoever it is: the same for two ranks that communicate alike, call by call."""
    events = RecordedRun(log).events()
    told = events[[*_ALIKE]].assign(is_root=events["peer"] == events["rank"])
    return hashlib.sha256(told.to_csv(index=False).encode()).hexdigest()


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
    """Parse --ranks; "all-distinct" begins with rank 0.

    Raises:
        DryRunError: The text is not a list of ranks of the job.
    """
    if text in ("all", ALL_DISTINCT):
        return [*range(world_size if text == "all" else 1)]
    try:
        found = parse_ranks(text)
    except ValueError:
        found = []
    if not found:
        raise DryRunError(f"--ranks {text}: not understood; give 0,1,60-63 say, all, or {ALL_DISTINCT}")
    if found[-1] >= world_size:
        raise DryRunError(
            f"--ranks {text}: rank {found[-1]} is not one of {world_size}, which are 0 to {world_size - 1}"
        )
    return found


def _check(outcomes: Mapping[int, RankOutcome]) -> None:
    """Raises _RankFailedError where a rank failed."""
    for outcome in outcomes.values():
        if outcome.status:
            recover_records(outcome.log)  # nothing of it stays in memory
            raise _RankFailedError(_how(outcome), _last_lines(outcome))


def _how(outcome: RankOutcome) -> str:
    """A rank ended that should not have ended so."""
    if outcome.timed_out:
        return f"rank {outcome.rank} was not done after {outcome.seconds:.0f} s (--timeout gives it longer)"
    how = f"by signal {-outcome.status}" if outcome.status < 0 else f"with status {outcome.status}"
    return f"rank {outcome.rank} ended {how}"


def _last_lines(outcome: RankOutcome) -> str:
    """Of what a rank wrote, below a line of their own; all of it is kept where that is more."""
    lines = outcome.output.read_text(errors="replace").splitlines()
    shown = "".join(f"\n    {line}" for line in lines[-_LAST_LINES:])
    if len(lines) <= _LAST_LINES:
        return shown
    handle, kept = tempfile.mkstemp(prefix=f"commtrace-dryrun-rank{outcome.rank:05d}-", suffix=".txt")
    os.close(handle)
    shutil.copyfile(outcome.output, kept)
    return f"{shown}\nall that it wrote is in {kept}"


def _log_of(outcome: RankOutcome) -> Log:
    try:
        log = open_log(outcome.log)
    except LogError:
        raise DryRunError(
            f"rank {outcome.rank} made no communication call: a script for one process, or one that needs other "
            "variables than RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT to know its place"
        ) from None
    if any(kind.api == "mpi" for process in log.processes for kind in process.tables.kinds.values()):
        raise DryRunError(
            f"rank {outcome.rank} communicated by MPI, where it was alone: a dry run simulates torch's process groups "
            "and no MPI; no log was written"
        )
    return log


def _publish(outcome: RankOutcome, out: Path, settings: Settings, alike: Sequence[int]) -> str:
    """Write the log of a rank, which stands for others that are alike; what to say of it."""
    log = _log_of(outcome)
    calls = 0
    for process in log.processes:
        calls += write_simulated_log(process, out / log.run / process.path.parent.name, settings, alike)
    took = f"{outcome.seconds:.1f} s, {outcome.peak_bytes >> 20:,} MiB, {calls:,} calls"
    stands = f", stands for {len(alike):,}: {format_ranks(alike)}" if alike else ""
    return f"rank {outcome.rank}: {took}{stands}"
