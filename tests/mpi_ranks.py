"""Starting ranks of MPI workloads, with a time limit."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import processes
import pytest

from commtrace.workloads.mpi import WorkloadError, launch

PROGRAM = Path(__file__).parent / "mpi_programs" / "workloads.py"
LIMIT_S = 120


def needs_mpi() -> None:
    """Skip a module's tests where there are no torch, mpi4py and mpiexec."""
    for name in ("torch", "mpi4py"):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)
    try:
        launch.mpiexec()
    except WorkloadError as error:
        pytest.skip(str(error), allow_module_level=True)


def mpiexec(ranks: int, *program: str | Path, **variables: Any) -> processes.Result:
    """Run Python on so many ranks."""
    command = launch.command(ranks, [sys.executable, *map(str, program)])
    return processes.run(command, limit=LIMIT_S, **launch.variables(ranks), **variables)


def run_cases(ranks: int, cases: list[tuple[str, list[str]]]) -> list[list[dict[str, Any]]]:
    """What each rank found of each case (workload, options)."""
    result = mpiexec(ranks, PROGRAM, json.dumps(cases))
    assert result.status == 0, result.out + result.err
    found = [json.loads(line) for line in result.out.splitlines() if line.startswith("[")]
    assert len(found) == len(cases), result.out + result.err
    return found
