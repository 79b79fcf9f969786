"""Dry run: select the ranks, run their processes, and write their log."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from commtrace import settings as all_settings
from commtrace.errors import CommtraceError, LogError, warn
from commtrace.formatting import format_plural
from commtrace.rank_ranges import format_ranks, parse_ranks
from commtrace.reading.log import Log, open_log
from commtrace.reading.recorded_run import RecordedRun
from commtrace.recording.recovery import recover_records

from .distinct_ranks import RankMismatchError, find_distinct
from .isolation.policy import Writes, can_be_private, can_refuse
from .rank_processes import CUDA_REQUIRED, DryRunRequest, RankOutcome, SimulatedJob, run_ranks
from .simulated_log import write_simulated_log

ALL_DISTINCT: Final = "all-distinct"

_FOLDER_PREFIX: Final = "commtrace-dryrun-"
_OWNED: Final = "owned"
"""File in a temporary directory that the dry run to which it belongs has locked."""

_LAUNCHERS: Final = ("torchrun", "deepspeed", "mpirun", "mpiexec", "srun", "accelerate", "prun", "jsrun")
_LAUNCHER_MODULES: Final = ("torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.runner")
_OUTPUT_LINES: Final = 25
"""Number of trailing output lines that the error message of a failed rank shows."""

# Columns of the event table that are equal for two ranks with equal communication.
_SIGNATURE_COLUMNS: Final = (
    "op", "variant", "api", "group_size", "role", "dtype", "payload_bytes", "wire_bytes", "step", "micro_batch",
    "phase", "site", "state", "flags",
)  # fmt: skip


class DryRunError(CommtraceError):
    """The program cannot be dry-run, or a rank of it failed."""


class _CudaRequiredError(DryRunError):
    """The program requires CUDA, which is not simulated."""


class _RankFailedError(DryRunError):
    """A rank failed. `args`: a message that says which rank and how, and the last lines of its output."""


def dry_run(request: DryRunRequest) -> None:
    """Run the ranks, write the log, and print a line for each rank.

    Raises:
        CommtraceError: The program cannot be dry-run, or a rank failed. The ranks that had finished get their logs, and
            so does the failed rank, with its calls until then.
    """
    request = replace(request, command=_resolve_program(request.command))
    ranks = _select_ranks(request.ranks, request.world_size)
    problem = _memory_problem() or _output_problem(request.out)
    if problem:
        raise DryRunError(problem)
    request = replace(request, writes=_choose_writes(request.writes))
    try:
        _dry_run(request, ranks, request.device or "any")
    except _CudaRequiredError:
        warn("dry run: the program requires CUDA; restarting with simulated devices (use --device cpu to prevent this)")
        _dry_run(request, ranks, "cuda")


def _dry_run(request: DryRunRequest, ranks: Sequence[int], device: str) -> None:
    run_id = time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + "-" + os.urandom(3).hex()
    with _folders(request) as (folder, shm):
        job = SimulatedJob(request, device, run_id, folder, shm, ranks[0] if request.shows_output else None)
        outcomes: dict[int, RankOutcome] = {}
        represented: Mapping[int, Sequence[int]] = dict.fromkeys(ranks, ())
        try:
            _run(job, ranks, outcomes)
            if request.ranks == ALL_DISTINCT:
                represented = _find_distinct_ranks(job, outcomes)
        except _RankFailedError as error:
            failure, output = error.args
            raise DryRunError(f"{failure}; {_write_incomplete(job, outcomes)}{output}") from None
        except RankMismatchError as error:
            raise DryRunError(f"{error}; {_write_incomplete(job, outcomes)}") from None
        log_directory = _write_logs(job, outcomes, represented)
    print(f"the log of run {run_id} is in {log_directory}")


@contextlib.contextmanager
def _folders(request: DryRunRequest) -> Iterator[tuple[Path, Path]]:
    """Make two temporary directories, the second in shared memory if there is any, and remove them afterwards."""
    settings = all_settings.from_environment(request.environment)
    assert settings is not None
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_temporary_directory(None))
        try:
            shm = stack.enter_context(_temporary_directory(settings.shm))
        except OSError:
            shm = folder / "shm"
        yield folder, shm


@contextlib.contextmanager
def _temporary_directory(parent: str | None) -> Iterator[Path]:
    """Make a temporary directory, and remove those of dry runs that were killed."""
    for stale in Path(parent or tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError), open(stale / _OWNED) as owned:
            fcntl.flock(owned, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(stale, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX, dir=parent, ignore_cleanup_errors=True) as name,
        open(Path(name, _OWNED), "w") as owned,
    ):
        fcntl.flock(owned, fcntl.LOCK_EX)
        yield Path(name)


# ---- the request -----------------------------------------------------------------------------------------------------


def _resolve_program(command: Sequence[str]) -> list[str]:
    """Return the command with the path of its program. Raises DryRunError for a launcher, which starts ranks itself."""
    if not command:
        raise DryRunError("no program given; append the command: commtrace dryrun --world-size 64 python train.py")
    launcher = Path(command[0]).name
    if launcher in _LAUNCHERS or any(module in command[:4] for module in _LAUNCHER_MODULES):
        raise DryRunError(
            f"{' '.join(command[:3])}: the program is a launcher, which starts ranks itself; give the command that it "
            "runs on each rank, for example python train.py"
        )
    program = shutil.which(command[0])
    if program is None:
        raise DryRunError(f"{command[0]}: no such program on PATH; give its path, or python and the script")
    return [program, *command[1:]]


def _select_ranks(text: str, world_size: int) -> list[int]:
    """Return the ranks that --ranks selects; for "all-distinct", only rank 0, which runs first."""
    if text in ("all", ALL_DISTINCT):
        return [*range(world_size if text == "all" else 1)]
    try:
        ranks = parse_ranks(text)
    except ValueError:
        ranks = []
    if not ranks:
        raise DryRunError(f"--ranks {text} is not a list of ranks; use, e.g., 0,1,60-63, or all, or {ALL_DISTINCT}")
    if ranks[-1] >= world_size:
        raise DryRunError(
            f"--ranks {text}: rank {ranks[-1]} is out of range; a job with --world-size {world_size} has ranks 0 to "
            f"{world_size - 1}"
        )
    return ranks


def _memory_problem() -> str:
    """Return why this process cannot allocate more memory than the machine has, and how to fix it, or ""."""
    with contextlib.suppress(OSError):
        if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
            return (
                "vm.overcommit_memory is 2, so the kernel does not overcommit memory; a dry run allocates as much "
                "memory as the job would, without touching it; fix: sysctl vm.overcommit_memory=0 (or 1)"
            )
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        return (
            f"the address space is limited to {limit >> 20:,} MiB (ulimit -v), and a dry run allocates as much as "
            "the job would; raise the limit (ulimit -v unlimited)"
        )
    return ""


def _output_problem(out: Path) -> str:
    """Return why no log can be written to `out`, or "". The directory is created later, with the first log."""
    existing = next(folder for folder in (out, *out.parents) if os.path.lexists(folder))
    if not existing.is_dir():
        return f"--out {out}: {existing} is not a directory; choose another one"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"--out {out}: no permission to write in {existing}; choose another directory"
    return ""


def _choose_writes(writes: Writes) -> Writes:
    """Return how writes are treated: as requested, or refused if this system provides no private layers."""
    problem = can_be_private() if writes is Writes.PRIVATE else ""
    if problem:
        warn(f"dry run: ranks get no private copy of files here ({problem}); the program's writes are refused")
        writes = Writes.REFUSE
    if writes is Writes.REFUSE and not can_refuse():
        raise DryRunError(
            "this kernel cannot keep the program from changing files: it allows neither private layers (user "
            "namespaces and overlays, Linux 5.11) nor Landlock (Linux 5.13); let the program write with --writes allow"
        )
    return writes


# ---- running ---------------------------------------------------------------------------------------------------------


def _run(job: SimulatedJob, ranks: Sequence[int], outcomes: dict[int, RankOutcome]) -> None:
    """Run ranks that have no outcome yet, and add their outcomes. Raises _CudaRequiredError or _RankFailedError."""
    run_ranks(job, ranks, outcomes)
    for outcome in outcomes.values():
        if not outcome.status:
            continue
        for log in job.folder.glob("log-*"):
            recover_records(log, shm=str(job.rings))  # of the failed rank, and of ranks killed with it
        if (job.messages / CUDA_REQUIRED).exists():
            raise _CudaRequiredError
        failure = f"rank {outcome.rank} {outcome.failure}{_hint(job.request, outcome, outcomes.values())}"
        raise _RankFailedError(failure, _last_lines(outcome))


def _hint(request: DryRunRequest, outcome: RankOutcome, others: Iterable[RankOutcome]) -> str:
    """Return what isolation may have to do with a failure, or ""."""
    if request.writes is Writes.REFUSE:
        return " (its writes were refused; --writes allow lets it write)"
    if outcome.full_disk:
        return f" (the disk of {outcome.full_disk}, which holds what it wrote, is full; set TMPDIR to a larger one)"
    missed = [line for line in outcome.output.read_text(errors="replace").splitlines() if "No such file" in line]
    for other in others:
        for change in other.changes if other is not outcome else ():
            if change.change == "created" and any(change.path in line for line in missed):
                return (
                    f" (rank {other.rank} wrote {change.path}, which other ranks of a dry run do not see: let a real "
                    "run write it first, or --writes allow)"
                )
    return ""


def _last_lines(outcome: RankOutcome) -> str:
    """Return the last lines of a rank's output, indented, and the path of a file with all of them if there are more."""
    lines = outcome.output.read_text(errors="replace").splitlines()
    shown = "".join(f"\n    {line}" for line in lines[-_OUTPUT_LINES:])
    if len(lines) <= _OUTPUT_LINES:
        return shown
    handle, copy = tempfile.mkstemp(prefix=f"commtrace-dryrun-rank{outcome.rank:05d}-", suffix=".txt")
    os.close(handle)
    shutil.copyfile(outcome.output, copy)
    return f"{shown}\nthe whole output is in {copy}"


def _find_distinct_ranks(job: SimulatedJob, outcomes: dict[int, RankOutcome]) -> dict[int, list[int]]:
    """Return a dict from each distinct rank to the ranks that it represents, including itself."""
    groups = [group for process in _recorded_log(outcomes[0]).processes for group in process.tables.topology]
    signatures: dict[int, str] = {}

    def run(ranks: Sequence[int]) -> dict[int, str]:
        _run(job, ranks, outcomes)
        new = [rank for rank in ranks if rank not in signatures]
        signatures.update({rank: signature(_recorded_log(outcomes[rank])) for rank in new})
        return signatures

    return find_distinct(job.request.world_size, groups, run)


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
            f"rank {outcome.rank} made no communication call; check that the script is distributed and that it takes "
            "its rank from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        ) from None
    if any(kind.api == "mpi" for process in log.processes for kind in process.tables.kinds.values()):
        raise DryRunError(
            f"rank {outcome.rank} communicated over MPI, which a dry run does not simulate: each rank is alone in its "
            "MPI world; no log was written; use torch.distributed process groups, or record a real run (commtrace run)"
        )
    return log


# ---- the log ---------------------------------------------------------------------------------------------------------


def _write_logs(
    job: SimulatedJob, outcomes: Mapping[int, RankOutcome], represented: Mapping[int, Sequence[int]]
) -> Path:
    """Write the logs of ranks, print a line for each, and return the directory.

    If writing to `out` fails, write them to a temporary directory instead, because the run may have taken hours.

    Args:
        job: The simulated job.
        outcomes: The outcomes of the ranks.
        represented: The ranks to write logs of, each with the ranks that it represents (empty: only itself).
    """

    def write(out: Path) -> list[str]:
        return [_write_log(job, outcomes[rank], out, represented[rank]) for rank in sorted(represented)]

    out = job.request.out
    try:
        lines = write(out)
    except OSError as error:
        shutil.rmtree(out / job.run, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix="commtrace-logs-"))
        warn(f"{out}: {error.strerror}; the log goes to {temporary}")
        out = temporary
        lines = write(out)
    print("\n".join(lines), flush=True)
    return out


def _write_incomplete(job: SimulatedJob, outcomes: Mapping[int, RankOutcome]) -> str:
    """Write the logs of complete ranks, and of the failed one until its failure, and return a clause that says so."""
    recorded = [rank for rank, outcome in sorted(outcomes.items()) if _has_calls(outcome)]
    complete = [rank for rank in recorded if not outcomes[rank].status]
    failed = [rank for rank in recorded if outcomes[rank].status]
    if not recorded:
        return "no log was written"
    directory = _write_logs(job, outcomes, dict.fromkeys(recorded, ()))
    noun = "rank" if len(complete) == 1 else "ranks"
    clauses = [f"the log of {noun} {format_ranks(complete)}, finished before the failure, is in {directory}"] * bool(
        complete
    )
    clauses += [f"the calls of rank {rank} until then are in {directory}, marked as incomplete" for rank in failed]
    return "; ".join(clauses)


def _has_calls(outcome: RankOutcome) -> bool:
    try:
        segments = [segment for process in _recorded_log(outcome).processes for segment in process.segments]
        return any(len(block) for segment in segments for block in segment.blocks())
    except DryRunError:
        return False


def _write_log(job: SimulatedJob, outcome: RankOutcome, out: Path, stands_for: Sequence[int]) -> str:
    log, settings = _recorded_log(outcome), all_settings.from_environment(job.request.environment)
    assert settings is not None
    calls = sum(
        write_simulated_log(
            process,
            out / log.run / process.path.parent.name,
            settings,
            job.device,
            stands_for,
            changes=outcome.changes,
            failure=outcome.failure,
        )
        for process in log.processes
    )
    cost = f"{outcome.seconds:.1f} s, {outcome.peak_bytes >> 20:,} MiB, {format_plural(calls, 'call')}"
    others = f", represents {format_plural(len(stands_for), 'rank')}: {format_ranks(stands_for)}" if stands_for else ""
    writes = f", would write {format_plural(len(outcome.changes), 'file')}" if outcome.changes else ""
    failed = f", failed: {outcome.failure}" if outcome.failure else ""
    return f"rank {outcome.rank}: {cost}{writes}{others}{failed}"
