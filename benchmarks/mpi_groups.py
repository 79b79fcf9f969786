"""Two ranks of MPI: this program again, by the `mpiexec` beside this Python, or by the command in MPIEXEC."""

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
    """Whether this process is one of the ranks."""
    return _RANK in os.environ


def run(program: Callable[[Any], Sequence[Row]], options: Any) -> list[Row]:
    """What rank 0 returns of a program. In a rank, runs it and ends the process."""
    if inside():
        _be_a_rank(program, options)
    with tempfile.TemporaryDirectory() as directory:
        rows = Path(directory, "rows.json")
        mpiexec = shlex.split(os.environ.get("MPIEXEC", str(Path(sys.prefix) / "bin" / "mpiexec")))
        status = subprocess.run(
            [*mpiexec, "-n", "2", sys.executable, *sys.argv],
            env={**os.environ, _RANK: str(rows), "OMP_NUM_THREADS": "1"},
            check=False,
        ).returncode
        if status:
            sys.exit(status)
        return results.rows({"rows": json.loads(rows.read_text())})


def _be_a_rank(program: Callable[[Any], Sequence[Row]], options: Any) -> None:
    path = Path(os.environ.pop(_RANK))  # no setting of commtrace
    rows = program(options)
    from mpi4py import MPI

    if MPI.COMM_WORLD.Get_rank() == 0:
        path.write_text(json.dumps([asdict(row) for row in rows]))
    sys.exit()
