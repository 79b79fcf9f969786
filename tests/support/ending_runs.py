"""Runs of `programs/ending_kinds.py` under several launchers, and whether the diagnosis of their ends is true."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any, Final

import mpi_launch
import processes
from ports import free_port

from commtrace.analyses.across_ranks.endings import find_endings
from commtrace.analyses.fold_engine import NamedTables
from commtrace.analyses.grouping import rows_of
from commtrace.run import open_run

LAUNCHERS: Final = ("torchrun", "deepspeed", "openmpi", "mpich")

EXPECTED: Final[dict[str, tuple[str, ...]]] = {
    "all": ("exception TypeError",),
    "one": ("exception RuntimeError",),
    "cleanup": ("exception RuntimeError",),
    "worker": ("exception OverflowError in a data-loader worker",),
    "thread": (),
    "autograd": ("exception ArithmeticError",),
    "forward": ("exception LookupError",),
    "sys.exit": ("status exit status 3", "exit "),
    "os._exit": ("status exit status 4", "died "),
    "abort": ("signal SIGABRT", "died "),
    "sigterm": ("signal SIGTERM", "died "),
    "sigterm_exit": ("status exit status 17", "exit "),
    "sigterm_raise": ("exception InterruptedError raised by its handler of SIGTERM",),
    "sigint": ("exception KeyboardInterrupt",),
    "sigkill": ("signal SIGKILL", "died "),
    "memory": ("exception numpy._core._exceptions._ArrayMemoryError", "exception MemoryError"),
    "killed for memory": (
        "signal SIGKILL for lack of memory (its control group counted one at that time)",
        "signal SIGKILL",
        "died ",
    ),
    "mpi_abort": ("abort MPI_Abort(7)",),
}
"""Kind -> true ends of the bad rank: the reason, or that it is not known; none: no process fails."""

_TORCH: Final = ("worker", "autograd", "forward")


def applies(kind: str, launcher: str) -> bool:
    """Return whether a launcher can run a kind."""
    if kind == "killed for memory":
        return _can_limit_memory()
    return kind != "mpi_abort" or launcher in ("openmpi", "mpich")


def _can_limit_memory() -> bool:
    """Return whether control groups with limited memory can be made. Remove those of earlier runs."""
    folder = Path("/sys/fs/cgroup/memory" if Path("/sys/fs/cgroup/memory").is_dir() else "/sys/fs/cgroup")
    for group in folder.glob("commtrace-test-*"):
        with contextlib.suppress(OSError):  # of a process that still runs
            group.rmdir()
    group = folder / "commtrace-test"
    try:
        group.mkdir()
        return any((group / name).exists() for name in ("memory.limit_in_bytes", "memory.max"))
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def run(
    launcher: str, kind: str, bad_rank: int, seed: int, size: int, log: Path | None, *, recorder: str = "python",
    report: Path | None = None, limit: float = 240,
) -> processes.Result:  # fmt: skip
    """Run a kind under a launcher, with `size` ranks."""
    program = processes.PROGRAMS / "ending_kinds.py"
    transport = "torch" if launcher in ("torchrun", "deepspeed") or kind in _TORCH else "mpi"
    arguments = [kind, bad_rank, seed, transport, *([report] if report else [])]
    variables: dict[str, Any] = {"COMMTRACE_RECORDER": recorder, **({"COMMTRACE": log} if log else {})}
    if launcher in ("openmpi", "mpich"):
        port = {"MASTER_PORT": free_port()}
        # mpi4py's own runner aborts the job if a rank raises an exception.
        command, mpi_variables = mpi_launch.command(launcher, program, arguments, size, log)
        at = command.index(str(program))
        command[at:at] = ["-m", "mpi4py"] if transport == "mpi" else []
        return processes.run(command, limit=limit, **{**mpi_variables, **port, **variables})
    scripts = Path(sys.executable).parent
    if launcher == "torchrun":
        command = [str(scripts / "torchrun"), "--standalone", "--nproc-per-node", str(size)]
    else:
        variables |= {"DS_ACCELERATOR": "cpu", "PATH": f"{scripts}:/usr/bin:/bin"}
        command = [
            str(scripts / "deepspeed"),
            "--no_local_rank",
            "--num_gpus",
            str(size),
            "--master_port",
            str(free_port()),
        ]
    return processes.run([*command, program, *map(str, arguments)], limit=limit, **variables)


def verdict(kind: str, bad_rank: int, size: int, log: Path) -> str:
    """Return "right", "not known" or "wrong", and why, of the diagnosis of a run."""
    tables = _endings(log)
    endings = tables["endings"]
    if kind == "thread":
        threads = tables["thread_exceptions"]
        is_right = [(row.rank, row.reason) for row in rows_of(threads)] == [(bad_rank, "ValueError")]
        return "right" if is_right and not len(endings) else f"wrong: {threads.to_dict('records')} {len(endings)}"
    if not len(endings):
        return "wrong: no failure"
    ends = {int(row.rank): f"{row.end} {row.reason}" for row in rows_of(endings)}
    first = {int(rank) for rank in endings.loc[endings["order"] == "first", "rank"]}
    if kind == "all":
        # The launcher may end a rank that has not raised its exception yet.
        true_ends = {*EXPECTED[kind], "signal SIGTERM", "signal SIGKILL", "died "}
        is_true = {*ends.values()} <= true_ends and all(ends[rank] in EXPECTED[kind] for rank in first)
        return "right" if is_true and first else "not known" if is_true else f"wrong: {ends}"
    if ends[bad_rank] not in EXPECTED[kind]:
        return f"wrong: {ends}"
    if kind == "cleanup":
        allowed = {"signal SIGTERM", "signal SIGKILL", "died "}
        if not {end for rank, end in ends.items() if rank != bad_rank} <= allowed:
            return f"wrong: {ends}"
    if first not in (set(), {bad_rank}):
        return f"wrong: first {first}, {ends}"
    return "right" if first and ends[bad_rank] == EXPECTED[kind][0] else f"not known: first {first}, {ends}"


def _endings(log: Path) -> NamedTables:
    """Return the tables of the ends of a run when all its processes have ended: some launchers end before them."""
    deadline = time.monotonic() + 30
    while True:
        recorded = open_run(log, recover=True)
        if all(end.state != "runs" for end in recorded.ends) or time.monotonic() > deadline:
            return find_endings(recorded)
        time.sleep(0.1)
