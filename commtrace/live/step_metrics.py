"""Numbers of the steps of this training, from a process of its own that follows the log."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from commtrace.errors import warn
from commtrace.recording.session import session

Step = tuple[int, dict[str, float]]
"""A training step, from 0, and its values by name (docs/how-to/watch.md)."""

END_SECONDS: Final = 10.0
"""Longest wait for the last steps."""
_COMMAND: Final = ("-m", "commtrace.cli", "metrics", "--json", "--until-eof", "--interval", "1")


def step_metrics() -> StepMetrics:
    """Return the numbers of this training's steps, to be asked for in the process that logs them."""
    return StepMetrics()


class StepMetrics:
    """Numbers of the steps of the training of this process, all ranks included.

    They are those of the report: of a step that is measured, one step or more after its end. The process that reads the
    log starts at the first `new` after the first communication call. It ends with this one, whatever ends this one. No
    method raises.
    """

    def __init__(self) -> None:
        self._follower: _Follower | None = None
        self._has_ended = False

    def new(self) -> list[Step]:
        """Return the steps that were measured since the last call, ascending. Does not wait."""
        if self._follower is None and not self._has_ended:
            self._follower = _start()
        return [] if self._follower is None else self._follower.take()

    def end(self, seconds: float = END_SECONDS) -> list[Step]:
        """Return the last steps, at the end of the training, and end the process that reads the log.

        Args:
            seconds: Longest wait for them: about 1 s for records to reach the log, and a reading.
        """
        if self._has_ended:
            return []
        self._has_ended = True
        if self._follower is None:
            if session.recorder is None:
                warn("no numbers of steps: this process is not traced (COMMTRACE)")
            return []
        self._follower.end(seconds)
        return self._follower.take()


def _start() -> _Follower | None:
    """Return a process that follows the log of this one; None while nothing is recorded, or if it cannot start."""
    recorder = session.recorder
    if recorder is None:
        return None
    try:
        return _Follower(recorder.run_directory)
    except OSError as error:
        warn(f"no numbers of steps: {error}")
        return _NoFollower()


class _Follower:
    """The process `commtrace metrics --json`, and the steps that it has measured."""

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, *_COMMAND, str(directory)]
        self._steps: deque[Step] = deque()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=_environment(os.environ), start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, name="commtrace-live", daemon=True)
        self._reader.start()

    def take(self) -> list[Step]:
        """Return the steps since the last call."""
        return [self._steps.popleft() for _ in range(len(self._steps))]

    def end(self, seconds: float) -> None:
        """Let it measure the last steps and end, within `seconds`."""
        with contextlib.suppress(OSError, ValueError):  # it may have ended
            assert self._process.stdin is not None
            self._process.stdin.write("end\n")
            self._process.stdin.close()
        self._reader.join(seconds)
        if self._reader.is_alive():
            warn(f"the last steps were not measured within {seconds:g} s")
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)

    def _read(self) -> None:
        assert self._process.stdout is not None
        message = ""
        with self._process.stdout as lines:
            for line in lines:
                try:
                    row = json.loads(line)
                    self._steps.append((row.pop("step"), row))
                except (ValueError, KeyError, AttributeError, TypeError):
                    message = line.strip() or message
        if self._process.wait() > 0:
            warn(f"no further numbers of steps: {message}")


class _NoFollower(_Follower):
    """Stands for a process that could not start."""

    def __init__(self) -> None:
        self._steps = deque()

    def end(self, seconds: float) -> None:
        """Do nothing."""


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the process that reads the log: it is not traced, and loads no libraries of the program.

    The variables that set threads and devices do not matter: it computes with pandas.
    """
    return {name: value for name, value in variables.items() if name not in ("COMMTRACE", "LD_PRELOAD")}


def prefixed(values: Mapping[str, float], prefix: str = "commtrace/") -> dict[str, Any]:
    """Return values under names for a logger."""
    return {f"{prefix}{name}".replace(" ", "_"): value for name, value in values.items()}
