"""Strong scaling of an MPI example: traced runs on several numbers of ranks, compared by `commtrace scaling`."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from commtrace import cli
from commtrace.commands.option_types import positive_integer, positive_number
from commtrace.errors import CommtraceError
from commtrace.network.mpiexec import mpiexec_command, mpiexec_variables

from .errors import ExampleError


def run(example: str, argv: Sequence[str] | None, published: str, tokens: Callable[[Sequence[str]], int]) -> int:
    """Run an example on each number of ranks, and compare the logs.

    Args:
        example: Its package within `examples`.
        argv: Arguments of the command; None: those of the process.
        published: Measurements of the original project, printed first.
        tokens: Returns the tokens of an iteration for the example's own options.

    Returns:
        The exit status of the first run that failed, else of `commtrace scaling`.
    """
    options, passed_on = _parse(example, argv)
    with contextlib.ExitStack() as stack:
        folder = Path(options.out or stack.enter_context(tempfile.TemporaryDirectory()))
        logs = [str(folder / f"ranks-{ranks}") for ranks in options.nproc]
        try:
            for ranks, log in zip(options.nproc, logs, strict=True):
                status = _start(ranks, [sys.executable, "-m", f"examples.{example}", *passed_on], log, options.timeout)
                if status:
                    return status
        except CommtraceError as error:
            print(f"{example}: error: {error}", file=sys.stderr)
            return 2
        arguments = ["scaling", *logs, "--tokens", str(tokens(passed_on))]
        print(f"\n{published}\n\n$ commtrace {shlex.join(arguments)}", flush=True)
        return cli.main(arguments)


def _parse(example: str, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    module = f"examples.{example}"
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}.scaling", epilog=f"All other options are those of {module}.", allow_abbrev=False
    )
    add = parser.add_argument
    ranks = "numbers of ranks; all are compared with the fewest (default: 1 2 4)"
    add("--nproc", type=positive_integer, nargs="+", default=[1, 2, 4], metavar="N", help=ranks)
    add("--timeout", type=positive_number, default=1800, metavar="S", help="timeout of one run (default: 1800)")
    add("--out", metavar="DIR", help="keep the logs, in DIR/ranks-N")
    return parser.parse_known_args(argv)


def _start(ranks: int, program: Sequence[str], log: str, timeout: float) -> int:
    """Run a program under mpiexec and return its exit status. Raises ExampleError after the timeout."""
    command = mpiexec_command(ranks, program)
    variables = {**mpiexec_variables(ranks), "COMMTRACE": log}
    print("\n$", *(f"{name}={value}" for name, value in variables.items()), shlex.join(command), flush=True)
    with subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True) as process:
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ExampleError(f"not finished after {timeout:g} s; give a longer --timeout") from None
        finally:
            # The launcher's ranks are in its process group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
