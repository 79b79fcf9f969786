"""Which process this is, whoever started it: torchrun, the deepspeed launcher, mpirun, srun, or nobody."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from commtrace.errors import LaunchError


@dataclass(frozen=True)
class Process:
    """This process among the others."""

    rank: int
    world_size: int
    local_rank: int


@dataclass(frozen=True)
class _Launcher:
    """Names of the variables in which a launcher tells rank, size and local rank, local size and the job's identity."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    job: str


_LAUNCHERS = (
    _Launcher("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
              "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"),
    # SLURM_STEP_NUM_TASKS and not SLURM_NTASKS: inside a batch script, outside srun, there is one process however many
    # tasks the job may start.
    _Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID"),
    _Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_JOBID"),
)  # fmt: skip


def find_process(environ: MutableMapping[str, str]) -> Process:
    """Read the launcher's variables and complete ``environ`` to what torch.distributed and DeepSpeed expect.

    A process that nobody launched is the only one of its job. Raises :class:`LaunchError` when the processes would not
    find each other.
    """
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        for launcher in _LAUNCHERS:
            if launcher.rank in environ and launcher.size in environ:
                _translate(launcher, environ)
                break
        else:
            environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=_free_port())
    environ.setdefault("LOCAL_RANK", environ["RANK"])
    return Process(*(_integer(environ, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))


def _translate(launcher: _Launcher, environ: MutableMapping[str, str]) -> None:
    environ["RANK"], environ["WORLD_SIZE"] = environ[launcher.rank], environ[launcher.size]
    environ["LOCAL_RANK"] = environ.get(launcher.local_rank, environ[launcher.rank])
    if "MASTER_ADDR" not in environ:
        if environ.get(launcher.local_size) != environ[launcher.size]:
            raise LaunchError(
                f"{launcher.rank} is set, but MASTER_ADDR is not, and the processes may run on several hosts; export "
                "MASTER_ADDR with the name of the host of rank 0 (mpirun: -x MASTER_ADDR)"
            )
        environ["MASTER_ADDR"] = "127.0.0.1"
    # A port from the job's name, so that two jobs on one host do not meet; below the range for outgoing connections.
    environ.setdefault("MASTER_PORT", str(20000 + zlib.crc32(environ.get(launcher.job, "").encode()) % 10000))


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError as error:
        raise LaunchError(f"{name} is {environ[name]!r} in the environment; the launcher must set a number") from error


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
