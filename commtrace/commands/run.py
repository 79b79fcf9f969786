"""`commtrace run`."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from commtrace.errors import CommtraceError

_PACKAGE = Path(__file__).resolve().parents[1]


class Command:
    """Run a program with tracing on.

    `commtrace run --out logs/run1 torchrun --nproc-per-node 2 train.py` does the same as setting COMMTRACE=logs/run1
    for the program. The process becomes the program, so that exit status and signals are the program's. The command
    also works where commtrace is only on PYTHONPATH (module trees of Spack or EasyBuild): Python reads no start-up
    files from there.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument(
            "--out", metavar="DIR", help="directory for the log (default: $COMMTRACE, or commtrace-logs)"
        )
        parser.add_argument("command", metavar="CMD", nargs=argparse.REMAINDER, help="program and its arguments")

    def run(self, arguments: argparse.Namespace) -> int:
        """Become the program; returns only with an error."""
        command: list[str] = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
        if not command:
            raise CommtraceError("no program given; say what to run: commtrace run torchrun train.py")
        program = shutil.which(command[0])
        if program is None:
            raise CommtraceError(f"{command[0]}: no such program on PATH; give its path, or python and the script")
        environment = traced(os.environ, arguments.out)
        try:
            os.execve(program, command, environment)
        except OSError as error:
            raise CommtraceError(f"{program}: cannot be run: {error.strerror}") from error


def traced(environ: Mapping[str, str], directory: str | None) -> dict[str, str]:
    """The environment with tracing on. Raises SettingsError for a setting that makes no sense."""
    from commtrace import settings

    environment = dict(environ)
    if directory is not None or environment.get("COMMTRACE", "0") in ("", "0"):
        environment["COMMTRACE"] = os.path.abspath(directory or settings.DEFAULT_DIRECTORY)
    settings.from_environment(environment)
    if not _starts_by_itself():
        environment["PYTHONPATH"] = _prepended(str(_PACKAGE / "bootstrap"), environment.get("PYTHONPATH", ""))
    return environment


def _starts_by_itself() -> bool:
    """Python reads start-up files from its site folders only: one that lies on PYTHONPATH it does not."""
    import site

    folders = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
    return any((Path(folder) / "commtrace.pth").exists() for folder in folders)


def _prepended(folder: str, path: str) -> str:
    return folder if not path else folder + os.pathsep + path
