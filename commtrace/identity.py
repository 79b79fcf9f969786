"""Identity of this process and its run: host, rank, launcher, and the run name that all its processes agree on."""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from commtrace.launchers import launcher_value
from commtrace.process_setup.system_files import read_stat, read_text


@dataclass(frozen=True)
class RankIdentity:
    """Rank of this process in the communication library."""

    rank: int
    world_size: int | None
    agree: Callable[[str], str] | None = None
    """Takes a proposed run name and returns the first one that any process proposed; None without a store."""


def rank_from_environment(environ: Mapping[str, str] = os.environ) -> RankIdentity:
    """Return the rank that the launcher set, for programs without a group of all ranks; rank 0 without a launcher."""
    return RankIdentity(launcher_value("rank", environ) or 0, launcher_value("world_size", environ))


def launcher_run_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return the launcher's name for this run, the same in all its processes; "" if there is none."""
    elastic = environ.get("TORCHELASTIC_RUN_ID", "")
    if elastic:
        # torchrun's default is "none"; with --standalone it is a UUID, whose first digits suffice.
        name = "" if elastic == "none" else "-" + re.sub(r"^([0-9a-f]{8})-[0-9a-f-]{27}$", r"\1", elastic)
        return f"torchelastic{name}-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if "SLURM_JOB_ID" in environ and "SLURM_PROCID" in environ:
        restart = environ.get("SLURM_RESTART_COUNT", "0")  # a requeued job keeps its number
        suffix = "" if restart == "0" else f"-restart{restart}"
        return f"slurm-{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '0')}{suffix}"
    if "PMIX_NAMESPACE" in environ:
        return f"pmix-{environ['PMIX_NAMESPACE']}"
    return ""


# Names of processes that start MPI ranks, truncated by the kernel to 15 characters.
_STARTERS = ("prterun", "prte", "prted", "orterun", "orted", "mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy")


def mpi_starter() -> str:
    """Return host, PID and start time of the process that started this MPI rank; "" if there is none.

    The host is the beginning of its boot ID, because containers on one host have host names of their own. The start
    time, in kernel ticks, distinguishes the process from others that had the same PID.
    """
    pid = os.getppid()
    while pid > 1 and (stat := read_stat(f"/proc/{pid}")) is not None:
        if stat.name in _STARTERS:
            return f"{boot_id()[:8] or host()}-{pid}-{stat.start_ticks:x}"
        pid = stat.parent
    return ""


_recordings = 0


def agree_on_run(rank_identity: RankIdentity) -> str:
    """Return the name of the run, the same in all its processes. It takes a round trip to a store, no collective."""
    global _recordings
    _recordings += 1
    suffix = "" if _recordings == 1 else str(_recordings)
    from_launcher = launcher_run_name()
    agreed = time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + "-" + os.urandom(3).hex()
    if rank_identity.agree is not None:
        agreed = rank_identity.agree(agreed) or (agreed if not from_launcher else "")
    elif from_launcher.startswith(("slurm-", "pmix-")):
        agreed = ""  # no store, but these names are used only once
    return _file_name("-".join(filter(None, (from_launcher, agreed, suffix))))


def reset_after_fork() -> None:
    """Reset the count of recordings in a forked child."""
    global _recordings
    _recordings = 0


def host() -> str:
    """Return the name of this host, usable as the name of a folder."""
    return _file_name(socket.gethostname()) or "host"


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip(".")[:200]


def boot_id() -> str:
    """Return an identifier that changes when the host restarts; "" if the system has none."""
    return read_text("/proc/sys/kernel/random/boot_id")


def versions() -> dict[str, str]:
    """Return the versions of Python, commtrace, and the traced libraries that this process has imported."""
    import commtrace

    names = ("torch", "deepspeed", "mpi4py", "transformers", "megatron")
    imported = {name: getattr(sys.modules.get(name), "__version__", None) for name in names}
    libraries = {name: str(version) for name, version in imported.items() if version is not None}
    return {"python": platform.python_version(), "commtrace": commtrace.__version__, **libraries}


def clock_readings() -> dict[str, int]:
    """Read the records' monotonic clock and the wall clock at the same moment, for comparing hosts.

    The wall clock is read between two readings of the monotonic clock, whose mean is accurate to about a microsecond.

    Returns:
        `mono_ns` and `unix_ns`.
    """
    before = time.monotonic_ns()
    unix = time.time_ns()
    return {"mono_ns": (before + time.monotonic_ns()) // 2, "unix_ns": unix}
