"""Run a program with tracing on.

`commtrace run --out logs/run1 torchrun --nproc-per-node 2 train.py` does the
same as setting COMMTRACE=logs/run1 for the program. The program replaces this
process, so the exit status and signals are those of the program. The command
also works if commtrace is only on PYTHONPATH (environment modules of Spack or
EasyBuild), where Python does not process .pth files.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from commtrace.errors import CommtraceError

from .option_types import add_program

_PACKAGE = Path(__file__).resolve().parents[1]


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--out", metavar="DIR", help="log directory (default: $COMMTRACE, or commtrace-logs)")
    add_program(parser)


def run(arguments: argparse.Namespace) -> int:
    """Replace this process with the program. Raises CommtraceError if that fails."""
    command: list[str] = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise CommtraceError("no program given; add it: commtrace run torchrun train.py")
    program = shutil.which(command[0])
    if program is None:
        raise CommtraceError(f"{command[0]}: no such program on PATH; give its path, or python and the script")
    environment = traced(os.environ, arguments.out)
    try:
        os.execve(program, command, environment)
    except OSError as error:
        raise CommtraceError(f"{program}: cannot be run: {error.strerror}") from error


def traced(environ: Mapping[str, str], directory: str | None) -> dict[str, str]:
    """Return the environment with tracing on. Raises SettingsError for an invalid setting."""
    from commtrace import settings

    environment = dict(environ)
    if directory is not None or environment.get("COMMTRACE", "0") in ("", "0"):
        environment["COMMTRACE"] = os.path.abspath(directory or settings.DEFAULT_DIRECTORY)
    settings.from_environment(environment)
    if not _has_startup_file():
        path = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = str(_PACKAGE / "bootstrap") + (os.pathsep + path if path else "")
    return environment


def _has_startup_file() -> bool:
    """Return whether a site folder has `commtrace.pth`; Python reads no start-up files from PYTHONPATH."""
    import site

    folders = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
    return any((Path(folder) / "commtrace.pth").exists() for folder in folders)
