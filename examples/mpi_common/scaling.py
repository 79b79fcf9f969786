"""A workload on 1, 2, 4 ... ranks of this machine, and the table of it."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from commtrace.errors import CommtraceError
from commtrace.network import mpiexec as launch

from . import tables
from .errors import ExampleError
from .options import positive
from .outcome import Outcome


def run(workload: str, argv: Sequence[str] | None, published: str, parts: Sequence[str] = ()) -> int:
    """The command of a workload's `scaling` module: all runs, then the tables; the status of the first that failed.

    published: what the authors of the original measured, to be shown first. parts: the forward pass's, by name.
    """
    options, passed_on = _parse(workload, argv)
    try:
        outcomes = [Outcome.read(file) for file in options.read or ()] or _run_all(workload, passed_on, options)
    except CommtraceError as error:
        print(f"{workload}: error: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        return error.returncode
    print(f"\n{published}\n\nHere ({outcomes[0].mode}):\n\n{tables.scaling(outcomes)}\n")
    by_part = tables.sublayers(outcomes, parts)
    if by_part:
        print(f"Speedup of the forward pass, communication included:\n\n{by_part}\n")
    print(*filter(None, [*tables.losses_to(outcomes), tables.growth(outcomes)]), sep="\n")
    print(*tables.taken_cores(outcomes), sep="\n")
    return 0


def _parse(workload: str, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    module = f"examples.{workload}"
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}.scaling", epilog=f"All other options are those of {module}.", allow_abbrev=False
    )
    ranks = "numbers of ranks, the first to compare with (default: 1 2 4)"
    parser.add_argument("--ranks", type=positive, nargs="+", default=[1, 2, 4], metavar="N", help=ranks)
    parser.add_argument("--limit", type=float, default=1800, metavar="S", help="seconds for one run (default: 1800)")
    parser.add_argument("--read", nargs="+", metavar="FILE", help="of runs that were made with --json; start none")
    parser.add_argument("--trace", metavar="DIR", help="trace each run, into DIR/ranks-N")
    return parser.parse_known_args(argv)


def _run_all(workload: str, passed_on: Sequence[str], options: argparse.Namespace) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        files = {ranks: Path(folder) / f"{ranks}.json" for ranks in options.ranks}
        for ranks, file in files.items():
            program = [sys.executable, "-m", f"examples.{workload}", *passed_on, "--json", str(file)]
            _start(ranks, program, options)
        return [Outcome.read(file) for file in files.values()]


def _start(ranks: int, program: Sequence[str], options: argparse.Namespace) -> None:
    """Raises CalledProcessError where a run fails, and ExampleError where it does not end."""
    command, variables = launch.mpiexec_command(ranks, program), launch.mpiexec_variables(ranks)
    if options.trace:
        variables["COMMTRACE"] = str(Path(options.trace) / f"ranks-{ranks}")
    print("\n$", *(f"{name}={value}" for name, value in variables.items()), shlex.join(command), flush=True)
    with subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True) as process:
        try:
            status = process.wait(options.limit)
        except subprocess.TimeoutExpired:
            raise ExampleError(f"no end after {options.limit:g} s; --limit gives it longer") from None
        finally:
            _kill(process.pid)
    if status:
        raise subprocess.CalledProcessError(status, command)


def _kill(group: int) -> None:
    """Whatever is left of a run: it is in a process group of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
