"""Ranks of small programs, forked from a process that has imported torch, because an import takes seconds."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import processes
from ports import free_port


class Ranks:
    """The processes of one program, by rank."""

    def __init__(self, nursery: Nursery, pids: list[int], output: Path) -> None:
        self._nursery, self.pids, self._output = nursery, pids, output

    def kill(self, *ranks: int, signal_: int = signal.SIGKILL) -> None:
        """Send a signal to these ranks. SIGKILL ends all of them before one can observe the end of another."""
        if signal_ == signal.SIGKILL and len(ranks) > 1:
            self.kill(*ranks, signal_=signal.SIGSTOP)
            while not all(self._state(rank) in "TZ" for rank in ranks):
                time.sleep(0.001)
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal_)

    def _state(self, rank: int) -> str:
        """Return the letter of the process's state, as in proc(5)."""
        return Path(f"/proc/{self.pids[rank]}/stat").read_text().rpartition(")")[2].split()[0]

    def wait(self, limit: float = processes.LIMIT_SECONDS) -> list[int]:
        """Return their exit statuses. Fail the test after `limit` seconds."""
        statuses: list[int | None] = self._nursery.ask({"wait": self.pids, "limit": limit})
        assert None not in statuses, f"no end after {limit} s\n{self.output(0)}\n{self.output(1)}"
        return [status for status in statuses if status is not None]

    def ended(self) -> bool:
        """Return whether all of them have ended."""
        return all(self._state(rank) == "Z" for rank in range(len(self.pids)))

    def output(self, rank: int) -> str:
        """Return what a rank wrote to stdout and stderr."""
        path = self._output / f"output{rank}"
        return path.read_text() if path.exists() else ""


class Nursery:
    """A process that imports torch with tracing on, and forks the ranks of programs.

    It also imports the given modules, with the given variables in its environment.
    """

    def __init__(self, recorder: str, *modules: str, **variables: object) -> None:
        self.recorder, self._modules, self._variables = recorder, modules, variables

    def __enter__(self) -> Nursery:
        self._process = subprocess.Popen(
            [sys.executable, str(processes.PROGRAMS / "nursery.py"), *self._modules],
            # No process ever records in this directory: each program gets its own.
            env=processes.environment(
                **{
                    "COMMTRACE": Path(tempfile.gettempdir()) / "commtrace-nursery",
                    "COMMTRACE_RECORDER": self.recorder,
                    **self._variables,
                }
            ),
            cwd=tempfile.gettempdir(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        processes.kill_group(self._process.pid)
        self._process.communicate()

    def start(
        self, program: str, directory: Path, *arguments: object, ranks: int = 2, traced: bool = True, **settings: object
    ) -> Ranks:
        """Start a program of `tests/support/programs` that logs into `directory`; settings are COMMTRACE_ variables."""
        output = Path(tempfile.mkdtemp(prefix="output", dir=directory.parent))
        order = {
            "program": str(processes.PROGRAMS / f"{program}.py"),
            "arguments": [str(argument) for argument in arguments],
            "directory": str(directory) if traced else "",
            "output": str(output),
            "settings": {f"COMMTRACE_{name.upper()}": str(value) for name, value in settings.items()},
            "ranks": ranks,
            "port": free_port(),
        }
        return Ranks(self, self.ask(order), output)

    def run(self, program: str, directory: Path, *arguments: object, **options: Any) -> tuple[list[int], list[str]]:
        """Run a program that ends by itself, and return its statuses and outputs."""
        started = self.start(program, directory, *arguments, **options)
        statuses = started.wait()
        return statuses, [started.output(rank) for rank in range(len(statuses))]

    def ask(self, order: dict[str, Any]) -> Any:
        """Send an order and return the answer, both a line of JSON."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], order.get("limit", processes.LIMIT_SECONDS) + 30)
        assert ready, "the nursery does not answer"
        return json.loads(self._process.stdout.readline())
