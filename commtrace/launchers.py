"""Variables that torchrun, deepspeed, mpirun and srun set for each rank; free ports of a host."""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from typing import Final, Literal, NamedTuple

from commtrace.errors import LaunchError


class Launcher(NamedTuple):
    """Names of the variables that a launcher sets; "" if it sets none."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    job: str


TORCH: Final = Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
"""Variables that torchrun and the deepspeed launcher set, and that torch.distributed reads."""

# SLURM_STEP_NUM_TASKS, not SLURM_NTASKS: in a batch script, outside srun, there is one process, however many tasks the
# job may start.
SLURM: Final = Launcher(
    "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID"
)

LAUNCHERS: Final = (
    TORCH,
    Launcher(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMIX_NAMESPACE",
    ),
    Launcher("PMIX_RANK", "", "", "", "PMIX_NAMESPACE"),
    Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_JOBID"),
    # Last: MPICH's mpiexec starts its proxies with srun, and ranks inherit Slurm's variables of the proxy.
    SLURM,
)  # fmt: skip
"""Launchers in order of precedence."""

VARIABLE_PREFIXES: Final = (
    "OMPI_", "PMI", "MPI_LOCAL", "SLURM_PROCID", "SLURM_LOCALID", "TORCHELASTIC_", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE",
)  # fmt: skip
"""Prefixes of the variables, besides those of torch.distributed, that could make a process act as a rank."""


class LaunchedProcess(NamedTuple):
    """The place of this process in its job."""

    rank: int
    world_size: int
    local_rank: int


def launcher_value(
    name: Literal["rank", "world_size", "local_rank"], environ: Mapping[str, str] = os.environ
) -> int | None:
    """Return this process's rank, the number of ranks, or its rank within the host; None if no launcher sets it."""
    texts = (environ.get(getattr(launcher, name), "") for launcher in LAUNCHERS)
    return next((int(text) for text in texts if text.isdigit()), None)


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher started this process as a rank. In a batch script, Slurm sets the rank, too."""
    return any(environ.get(launcher.world_size if launcher is SLURM else launcher.rank) for launcher in LAUNCHERS)


def find_process(environ: MutableMapping[str, str]) -> LaunchedProcess:
    """Read the launcher's variables, and add to `environ` those that torch.distributed and DeepSpeed expect.

    Without a launcher, the process becomes the only rank of its job.

    Raises:
        LaunchError: The variables do not say where the other processes are, or are not numbers.
    """
    if TORCH.rank not in environ or TORCH.world_size not in environ:
        for launcher in LAUNCHERS:
            if launcher is not TORCH and launcher.rank in environ and launcher.world_size in environ:
                _translate(launcher, environ)
                break
        else:
            environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
            environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    environ.setdefault(TORCH.local_rank, environ[TORCH.rank])
    return LaunchedProcess(*(_integer(environ, name) for name in (TORCH.rank, TORCH.world_size, TORCH.local_rank)))


def _translate(launcher: Launcher, environ: MutableMapping[str, str]) -> None:
    environ[TORCH.rank], environ[TORCH.world_size] = environ[launcher.rank], environ[launcher.world_size]
    # Under `srun --mpi=pmi2`, PMI sets the rank, and only Slurm sets the local rank.
    known_local_rank = launcher_value(
        "local_rank", {name: value for name, value in environ.items() if name != TORCH.local_rank}
    )
    environ[TORCH.local_rank] = environ[launcher.rank] if known_local_rank is None else str(known_local_rank)
    if "MASTER_ADDR" not in environ:
        local_sizes = [environ.get(name) for name in (launcher.local_world_size, SLURM.local_world_size)]
        if environ[launcher.world_size] not in local_sizes:
            raise LaunchError(
                f"{launcher.rank} is set, but MASTER_ADDR is not, and the processes may run on several hosts; export "
                "MASTER_ADDR with the name of the host of rank 0 (mpirun: -x MASTER_ADDR)"
            )
        environ["MASTER_ADDR"] = "127.0.0.1"
    # From the job's name, so that jobs on one host use different ports; below the range for outgoing connections.
    environ.setdefault("MASTER_PORT", str(20000 + zlib.crc32(environ.get(launcher.job, "").encode()) % 10000))


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError as error:
        raise LaunchError(f"{name} is {environ[name]!r} in the environment; the launcher must set a number") from error


def free_port() -> int:
    """Return a port of this host that nothing listens on, below the range for outgoing connections."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", 10_000 + int.from_bytes(os.urandom(2), "big") % 22_000))
            return int(probe.getsockname()[1])
