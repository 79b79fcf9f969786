"""`commtrace report`."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Final

from commtrace.errors import CommtraceError

if TYPE_CHECKING:
    from commtrace.reading.run import Run

PARALLEL_FROM: Final = 8_000_000
"""Records above which worker processes are worth their start."""

NARROWEST: Final = 72


class Command:
    """Show what a run communicated.

    Begins with what the log covers, what tracing cost, and what the hooks cannot see; then volumes by operation,
    parallel dimension, phase, step and line of code, message sizes, times and the balance of the ranks. DIR may hold
    several runs: the newest is shown. A damaged log is reported as far as it goes.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument(
            "directory", metavar="DIR", type=Path, help="what COMMTRACE named, or the folder of one run in it"
        )
        parser.add_argument("--json", action="store_true", help="all tables, with exact numbers, as one JSON document")
        parser.add_argument(
            "--sites", metavar="N", type=_natural, default=10, help="lines of code to show (10; 0: all)"
        )
        parser.add_argument("--width", metavar="N", type=_width, default=None, help="columns of text, or auto (auto)")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the report."""
        from commtrace.reading.run import open_run

        run = open_run(arguments.directory)
        with _executor(run) as executor:
            tables = run.tables(executor)
        if arguments.json:
            from .document import to_json

            print(to_json(run, tables))
            return 0
        from rich.console import Console

        from .terminal import render

        width = arguments.width or max(NARROWEST, shutil.get_terminal_size((80, 24)).columns)
        console = Console(width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)
        for part in render(run, tables, width, sites=arguments.sites, letters=_letters()):
            console.print(part)
        return 0


def _natural(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return int(text)


def _width(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit() or int(text) < NARROWEST:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number from {NARROWEST}")
    return int(text)


def _letters() -> bool:
    """Whether stdout takes more than ASCII."""
    return (sys.stdout.encoding or "ascii").lower().replace("-", "").startswith("utf")


def workers() -> int:
    """Processes that may run at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _executor(run: Run) -> Iterator[Executor | None]:
    """Worker processes where there is much to read, else None."""
    records = sum(segment.count for process in run.processes for segment in process.segments)
    if records < PARALLEL_FROM or workers() < 2:
        yield None
        return
    try:
        # spawn: a fork would copy the locks of pyarrow's threads.
        with ProcessPoolExecutor(min(workers(), 16), multiprocessing.get_context("spawn")) as executor:
            yield executor
    except BrokenProcessPool:
        raise CommtraceError(f"{run.log.path}: a worker process was killed, probably for want of memory") from None
