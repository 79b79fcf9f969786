"""Two MPI ranks that run a benchmark again, started by this Python's `mpiexec` or the command in MPIEXEC."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import results
from measuring import Row

_RANK = "COMMTRACE_BENCHMARK_RANK"


def inside() -> bool:
    """Return whether this process is one of the ranks."""
    return _RANK in os.environ


def launcher(ranks: int) -> list[str]:
    """Return the command that starts ranks: this Python's `mpiexec`, or the one in MPIEXEC."""
    return [*shlex.split(os.environ.get("MPIEXEC", str(Path(sys.prefix) / "bin" / "mpiexec"))), "-n", str(ranks)]


def run(program: Callable[[Any], Sequence[Row]], options: Any) -> list[Row]:
    """Return rank 0's rows of a program. In a rank, run the program and end the process."""
    if inside():
        _run_rank(program, options)
    with tempfile.TemporaryDirectory() as directory:
        rows = Path(directory, "rows.json")
        status = subprocess.run(
            [*launcher(2), sys.executable, *sys.argv],
            env={**os.environ, _RANK: str(rows), "OMP_NUM_THREADS": "1"},
            check=False,
        ).returncode
        if status:
            sys.exit(status)
        return results.rows({"rows": json.loads(rows.read_text())})


def _run_rank(program: Callable[[Any], Sequence[Row]], options: Any) -> None:
    path = Path(os.environ.pop(_RANK))  # commtrace rejects an unknown setting
    rows = program(options)
    from mpi4py import MPI

    if MPI.COMM_WORLD.Get_rank() == 0:
        path.write_text(json.dumps([asdict(row) for row in rows]))
    sys.exit()
