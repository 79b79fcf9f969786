"""Run ranks of MPI workloads with a time limit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import processes
import pytest

from commtrace.errors import CommtraceError
from commtrace.network import mpiexec as launch

PROGRAM = Path(__file__).parent / "mpi_programs" / "workloads.py"
LIMIT_S = 120


def has_mpiexec() -> bool:
    """Return whether ranks can be started here."""
    try:
        launch.find_mpiexec()
    except CommtraceError:
        return False
    return True


needs_mpiexec = pytest.mark.skipif(not has_mpiexec(), reason="there is no mpiexec")


def mpiexec(ranks: int, *program: str | Path, **variables: Any) -> processes.Result:
    """Run Python on `ranks` ranks."""
    command = launch.mpiexec_command(ranks, [sys.executable, *map(str, program)])
    variables |= launch.mpiexec_variables(ranks)
    return processes.run(command, limit=LIMIT_S, **variables)


def run_cases(ranks: int, cases: list[tuple[str, list[str], bool]]) -> list[list[dict[str, Any]]]:
    """Return what each rank reported for each case (workload, options, whether tensors are staged as for a GPU)."""
    result = mpiexec(ranks, PROGRAM, json.dumps(cases))
    assert result.status == 0, result.out + result.err
    by_case = [json.loads(line) for line in result.out.splitlines() if line.startswith("[")]
    assert len(by_case) == len(cases), result.out + result.err
    return by_case
