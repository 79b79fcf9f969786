"""Run programs that use mpi4py under each installed MPI, with a time limit."""

from __future__ import annotations

import atexit
import contextlib
import functools
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import processes
import pytest

with contextlib.suppress(ImportError):
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False  # not in the tests' own process

PROGRAMS = Path(__file__).with_name("mpi_programs")


class Mpi(NamedTuple):
    """An MPI from PyPI: how to start it, and where its library is in the environment's directory."""

    name: str
    launcher: str
    options: tuple[str, ...]
    library: str
    variables: dict[str, str]


MPIS = (
    Mpi(
        "openmpi",
        "prterun",
        ("--personality", "ompi", "--map-by", ":oversubscribe", "--bind-to", "none"),
        "libmpi.so.40",
        {
            "PRTE_ALLOW_RUN_AS_ROOT": "1",
            "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep",
            "OMPI_MCA_btl": "self,sm,tcp",
        },
    ),
    Mpi(
        "mpich",
        "mpiexec.hydra",
        (),
        "libmpi.so.12",
        {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", "MPIR_CVAR_POLLS_BEFORE_YIELD": "100"},
    ),
)
NAMES = tuple(mpi.name for mpi in MPIS)


def obstacle(name: str) -> str:
    """Return why this MPI cannot be used here; "" if it can."""
    mpi = _mpi(name)
    if find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    if not (_root() / "bin" / mpi.launcher).exists() or not (_root() / "lib" / mpi.library).exists():
        return f"{name} is not installed (pip install {name})"
    return ""


def needs(name: str) -> None:
    """Skip the test if this MPI is not installed."""
    if obstacle(name):
        pytest.skip(obstacle(name))


@functools.cache
def _mpi(name: str) -> Mpi:
    return next(mpi for mpi in MPIS if mpi.name == name)


def _root() -> Path:
    return Path(sys.prefix)


def run(
    name: str, program: str | Path, *arguments: object, ranks: int = 3, log: Path | None = None, limit: float = 60,
    **variables: Any,
) -> processes.Result:  # fmt: skip
    """Run a program of `tests/support/mpi_programs` (or a file) on some ranks, traced into `log` if that is given."""
    arguments_, mpi_variables = command(name, program, arguments, ranks, log)
    return processes.run(arguments_, limit=limit, **{**mpi_variables, **variables})


@contextlib.contextmanager
def started(
    name: str, program: str | Path, *arguments: object, ranks: int, log: Path, **variables: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program that does not end, as `run` does; it is killed with its launcher."""
    arguments_, mpi_variables = command(name, program, arguments, ranks, log)
    environment = processes.environment(**{**mpi_variables, **variables})
    with subprocess.Popen(
        arguments_, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            processes.kill_group(process.pid)


def command(
    name: str, program: str | Path, arguments: Sequence[object], ranks: int, log: Path | None
) -> tuple[list[str], dict[str, Any]]:
    """Return the command that starts a program, and the environment variables that it needs."""
    mpi = _mpi(name)
    path = PROGRAMS / f"{program}.py" if isinstance(program, str) else program
    launcher = [_root() / "bin" / mpi.launcher, *mpi.options, "-n", ranks]
    settings: dict[str, Any] = {} if log is None else {"COMMTRACE": log}
    if name == "openmpi":
        # A launcher that is killed leaves its directory, in which another one with its process id could not start.
        folder = tempfile.TemporaryDirectory(prefix="mpi-", ignore_cleanup_errors=True)
        atexit.register(folder.cleanup)
        settings["PRTE_MCA_prte_tmpdir_base"] = folder.name
    variables = {**mpi.variables, "MPI4PY_LIBMPI": _root() / "lib" / mpi.library, **settings}
    return [str(part) for part in (*launcher, sys.executable, path, *arguments)], variables


def succeeds(name: str, program: str | Path, *arguments: object, **options: Any) -> processes.Result:
    """Run a program as `run` does, and assert that it succeeds."""
    result = run(name, program, *arguments, **options)
    assert result.status == 0, f"status {result.status}\n{result.out[-4000:]}\n{result.err[-8000:]}"
    return result
