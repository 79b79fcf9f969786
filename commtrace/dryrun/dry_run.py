"""A dry run: select the ranks, run their processes, write their log."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from commtrace import settings as all_settings
from commtrace.errors import CommtraceError, LogError
from commtrace.formatting import format_plural, format_ranks, parse_ranks
from commtrace.launchers import usable_cores
from commtrace.reading.log import Log, open_log
from commtrace.reading.recorded_run import RecordedRun
from commtrace.recording.log_writer import warn
from commtrace.recording.recovery import recover_records
from commtrace.settings import Settings

from .distinct_ranks import find_distinct
from .memory_limits import memory_obstacle
from .rank_processes import CUDA_REQUIRED, RankOutcome, SimulatedJob, run_ranks
from .simulated_log import write_simulated_log

ALL_DISTINCT: Final = "all-distinct"

_LAUNCHERS: Final = ("torchrun", "deepspeed", "mpirun", "mpiexec", "srun", "accelerate", "prun", "jsrun")
_LAUNCHER_MODULES: Final = ("torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.runner")
_MAX_JOBS: Final = 4
_OUTPUT_LINES: Final = 25
"""Last lines of a failed rank's output in the error message."""

# Columns of the event table that are equal for two ranks with equal communication.
_SIGNATURE_COLUMNS: Final = (
    "op", "variant", "api", "group_size", "role", "dtype", "payload_bytes", "wire_bytes", "step", "micro_batch",
    "phase", "site", "state", "flags",
)  # fmt: skip


class DryRunError(CommtraceError):
    """The program cannot be dry-run, or a rank of it failed."""


@dataclass(frozen=True)
class DryRunRequest:
    """What to run."""

    command: Sequence[str]  # the program and its arguments
    environment: Mapping[str, str]  # variables of the program, with tracing into `out` on
    world_size: int  # number of ranks of the job
    ranks: str  # the ranks to run: "0,60-63", "all", or "all-distinct"
    out: Path  # absolute path of the directory for the log
    ranks_per_node: int  # number of ranks of the job on each host
    device: str | None  # "cpu", "cuda" for simulated devices; None: CUDA if the program requires it
    jobs: int | None  # number of ranks to run at once; None: as many as there are cores, at most 4
    timeout_s: float  # seconds after which a rank is ended


class _CudaRequiredError(DryRunError):
    """The program requires CUDA, which is not simulated."""


class _RankFailedError(DryRunError):
    """A rank failed; `output` has the last lines of its output."""

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.output = output


def dry_run(request: DryRunRequest) -> None:
    """Run the ranks, write the log, and print a line for each rank.

    Raises:
        CommtraceError: The program cannot be dry-run, or a rank failed. The log of ranks that ran before the failed
            one is written, unless `ranks` is "all-distinct": it is not known yet which ranks they stand for.
    """
    command = _resolve_program(request.command)
    ranks = _select_ranks(request.ranks, request.world_size)
    problem = memory_obstacle() or _unwritable(request.out)
    if problem:
        raise DryRunError(problem)
    try:
        _dry_run(request, command, ranks, request.device or "any")
    except _CudaRequiredError:
        warn("dry run: the program requires CUDA; it starts again with simulated devices (--device cpu prevents this)")
        _dry_run(request, command, ranks, "cuda")


def _dry_run(request: DryRunRequest, command: Sequence[str], ranks: Sequence[int], device: str) -> None:
    settings = all_settings.from_environment(request.environment)
    assert settings is not None
    with tempfile.TemporaryDirectory(prefix="commtrace-dryrun-") as folder:
        job = SimulatedJob(
            command,
            request.environment,
            request.world_size,
            request.ranks_per_node,
            time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + "-" + os.urandom(3).hex(),
            Path(folder),
            request.timeout_s,
            device,
            shown_rank=ranks[0],
        )
        jobs = request.jobs or min(_MAX_JOBS, usable_cores())
        outcomes: dict[int, RankOutcome] = {}
        stands_for: dict[int, list[int]] = {}
        try:
            _run(job, ranks, jobs, outcomes)
            if request.ranks == ALL_DISTINCT:
                stands_for = _find_distinct_ranks(job, jobs, outcomes)
        except _RankFailedError as error:
            complete = [rank for rank in ranks if rank in outcomes and not outcomes[rank].status]
            if request.ranks == ALL_DISTINCT or not complete:
                raise DryRunError(f"{error}; no log was written{error.output}") from None
            written = _write_logs(job, {rank: outcomes[rank] for rank in complete}, request.out, settings, {})
            noun = "rank" if len(complete) == 1 else "ranks"
            raise DryRunError(
                f"{error}; the log of {noun} {format_ranks(complete)}, done before, is in {written}{error.output}"
            ) from None
        selected = {rank: outcomes[rank] for rank in sorted(stands_for) or ranks}
        written = _write_logs(job, selected, request.out, settings, stands_for)
    print(f"the log of run {job.run} is in {written}")


# ---- the request -----------------------------------------------------------------------------------------------------


def _resolve_program(command: Sequence[str]) -> list[str]:
    """Return the command with the path of its program. A launcher is an error: it starts ranks itself."""
    if not command:
        raise DryRunError("no program given; say what each rank runs: commtrace dryrun --world-size 64 python train.py")
    launcher = Path(command[0]).name
    if launcher in _LAUNCHERS or any(module in command[:4] for module in _LAUNCHER_MODULES):
        raise DryRunError(
            f"{' '.join(command[:3])}: a launcher, which starts ranks itself; give the command that it would start on "
            "each rank, for example python train.py"
        )
    program = shutil.which(command[0])
    if program is None:
        raise DryRunError(f"{command[0]}: no such program on PATH; give its path, or python and the script")
    return [program, *command[1:]]


def _select_ranks(text: str, world_size: int) -> list[int]:
    """Parse --ranks; "all-distinct" begins with rank 0."""
    if text in ("all", ALL_DISTINCT):
        return [*range(world_size if text == "all" else 1)]
    try:
        ranks = parse_ranks(text)
    except ValueError:
        ranks = []
    if not ranks:
        raise DryRunError(f"--ranks {text}: not a list of ranks; give for example 0,1,60-63, or all, or {ALL_DISTINCT}")
    if ranks[-1] >= world_size:
        raise DryRunError(
            f"--ranks {text}: rank {ranks[-1]} is not one of {world_size}, which are 0 to {world_size - 1}"
        )
    return ranks


def _unwritable(out: Path) -> str:
    """Return why no log can be written to `out`, else "". The directory is made later, with the first log."""
    existing = next(folder for folder in (out, *out.parents) if os.path.lexists(folder))
    if not existing.is_dir():
        return f"--out {out}: {existing} is not a directory; choose another one"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"--out {out}: no permission to write in {existing}; choose another directory"
    return ""


# ---- running ---------------------------------------------------------------------------------------------------------


def _run(job: SimulatedJob, ranks: Sequence[int], jobs: int, outcomes: dict[int, RankOutcome]) -> None:
    """Run ranks that have no outcome yet, and add their outcomes. Raises _RankFailedError."""
    run_ranks(job, ranks, jobs, outcomes)
    for outcome in outcomes.values():
        if not outcome.status:
            continue
        for log in job.folder.glob("log-*"):
            recover_records(log)  # removes what it, and those that were ended with it, left in shared memory
        if (job.mail / CUDA_REQUIRED).exists():
            raise _CudaRequiredError
        if outcome.timed_out:
            end = f"was not done after {outcome.seconds:.0f} s (--timeout gives it longer)"
        elif outcome.status < 0:
            end = f"ended by signal {-outcome.status}"
        else:
            end = f"ended with status {outcome.status}"
        raise _RankFailedError(f"rank {outcome.rank} {end}", _last_lines(outcome))


def _last_lines(outcome: RankOutcome) -> str:
    """Return the end of a rank's output, indented, and the file with all of it if there is more."""
    lines = outcome.output.read_text(errors="replace").splitlines()
    shown = "".join(f"\n    {line}" for line in lines[-_OUTPUT_LINES:])
    if len(lines) <= _OUTPUT_LINES:
        return shown
    handle, copy = tempfile.mkstemp(prefix=f"commtrace-dryrun-rank{outcome.rank:05d}-", suffix=".txt")
    os.close(handle)
    shutil.copyfile(outcome.output, copy)
    return f"{shown}\nthe whole output is in {copy}"


def _find_distinct_ranks(job: SimulatedJob, jobs: int, outcomes: dict[int, RankOutcome]) -> dict[int, list[int]]:
    """Return the ranks that differ -> the ranks that each stands for."""
    groups = [group for process in _recorded_log(outcomes[0]).processes for group in process.tables.topology]
    signatures: dict[int, str] = {}

    def run(ranks: Sequence[int]) -> dict[int, str]:
        _run(job, ranks, jobs, outcomes)
        new = [rank for rank in ranks if rank not in signatures]
        signatures.update({rank: signature(_recorded_log(outcomes[rank])) for rank in new})
        return signatures

    return find_distinct(job.world_size, groups, run)


def signature(log: Log) -> str:
    """Return a hash of a rank's calls, equal for ranks with equal communication, call by call."""
    events = RecordedRun(log).events()
    columns = events[[*_SIGNATURE_COLUMNS]].assign(is_root=events["peer"] == events["rank"])
    return hashlib.sha256(columns.to_csv(index=False).encode()).hexdigest()


def _recorded_log(outcome: RankOutcome) -> Log:
    try:
        log = open_log(outcome.log)
    except LogError:
        raise DryRunError(
            f"rank {outcome.rank} made no communication call: a script for one process, or one that needs other "
            "variables than RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT to find its rank"
        ) from None
    if any(kind.api == "mpi" for process in log.processes for kind in process.tables.kinds.values()):
        raise DryRunError(
            f"rank {outcome.rank} communicated by MPI, where it was alone: a dry run simulates torch's process groups "
            "and no MPI; no log was written"
        )
    return log


# ---- the log ---------------------------------------------------------------------------------------------------------


def _write_logs(
    job: SimulatedJob,
    outcomes: Mapping[int, RankOutcome],
    out: Path,
    settings: Settings,
    stands_for: Mapping[int, Sequence[int]],
) -> Path:
    """Write the logs of ranks, print a line for each, and return the directory.

    If `out` has no room, the logs go to a temporary directory: hours of work may be behind them.
    """

    def write() -> list[str]:
        return [_write_log(job, outcome, out, settings, stands_for.get(rank, ())) for rank, outcome in outcomes.items()]

    try:
        lines = write()
    except OSError as error:
        shutil.rmtree(out / job.run, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix="commtrace-logs-"))
        warn(f"{out}: {error.strerror}; the log goes to {temporary}")
        out = temporary
        lines = write()
    print("\n".join(lines), flush=True)
    return out


def _write_log(
    job: SimulatedJob, outcome: RankOutcome, out: Path, settings: Settings, stands_for: Sequence[int]
) -> str:
    log = _recorded_log(outcome)
    calls = sum(
        write_simulated_log(process, out / log.run / process.path.parent.name, settings, job.device, stands_for)
        for process in log.processes
    )
    cost = f"{outcome.seconds:.1f} s, {outcome.peak_bytes >> 20:,} MiB, {format_plural(calls, 'call')}"
    others = f", stands for {len(stands_for):,}: {format_ranks(stands_for)}" if stands_for else ""
    return f"rank {outcome.rank}: {cost}{others}"
