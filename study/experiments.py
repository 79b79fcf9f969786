"""Experiments and their results: each is run once, in a folder that gets its name when all is there.

logs/study/volume/19M-zero3-16-...      a result: what the experiment left, and
    experiment.json                     its title, what it took (wall and CPU seconds), and the command
logs/study/volume/.19M-...part          one that was interrupted: run again from the beginning

"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from commtrace.errors import CommtraceError

OUTPUT: Final = "output.txt"
"""What the program of an experiment wrote, in the experiment's folder."""
_LAST_LINES: Final = 15


class ExperimentError(CommtraceError):
    """A program of an experiment failed."""


@dataclass(frozen=True)
class Cost:
    """What a program and all that it started took."""

    wall_seconds: float
    cpu_seconds: float


def execute(
    command: Sequence[str], folder: Path, *, environment: Mapping[str, str] | None = None, limit_seconds: float = 1800
) -> Cost:
    """Run a program, its output in `folder`/output.txt; `environment` is added to the process's own.

    It and all that it started are ended when the study is interrupted, or after the limit. Raises ExperimentError with
    the end of its output.
    """
    began = time.monotonic()
    with (folder / OUTPUT).open("ab") as output:
        process = subprocess.Popen(
            [*command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            while not (found := os.wait4(process.pid, os.WNOHANG))[0]:
                if time.monotonic() - began > limit_seconds:
                    raise ExperimentError(f"not done after {limit_seconds:.0f} s{_end(folder / OUTPUT)}")
                time.sleep(0.02)
        except BaseException:
            _end_all(process)
            raise
    process.returncode = status = os.waitstatus_to_exitcode(found[1])
    if status:
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        raise ExperimentError(f"ended {how}{_end(folder / OUTPUT)}")
    return Cost(time.monotonic() - began, found[2].ru_utime + found[2].ru_stime)


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """End the program and what it started: first politely, so that it can take away what it wrote."""
    for how in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)


def _end(file: Path) -> str:
    lines = file.read_bytes().decode(errors="replace").splitlines()[-_LAST_LINES:]
    return "".join(f"\n    {line}" for line in lines)
