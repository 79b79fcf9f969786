"""`commtrace report`."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Final

from commtrace.errors import CommtraceError
from commtrace.launchers import usable_cores

from .option_types import add_formats, add_network, add_width, non_negative_integer

if TYPE_CHECKING:
    from commtrace.analyses.engine import Analysis, NamedTables
    from commtrace.run import Run

PARALLEL_FROM: Final = 8_000_000
"""Records above which worker processes are worth their start."""


class Command:
    """Show what a run communicated.

    The report begins with the coverage of the log, the cost of tracing, and the blind spots of the hooks. Then come
    volumes by operation, parallel dimension, phase, step and call site, message sizes, times and the balance of the
    ranks. If DIR holds several runs, the newest is shown. A damaged log is reported as far as it can be read. Several
    DIRs are shown side by side.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument(
            "directories",
            metavar="DIR",
            type=Path,
            nargs="+",
            help="log directory, as in COMMTRACE, or the folder of one run in it; several: runs side by side",
        )
        add_formats(parser)
        add_network(parser, "compare times with a network")
        parser.add_argument(
            "--sites",
            metavar="N",
            type=non_negative_integer,
            help="number of call sites to show; 0: all (default: 10, in HTML 40)",
        )
        add_width(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the report, or write the page."""
        from commtrace.analyses.comparison import names_of
        from commtrace.run import open_run

        if arguments.network is not None and len(arguments.directories) > 1:
            raise CommtraceError("--network compares one run with a network; give one directory")
        if arguments.html is not None:
            return _write_page(arguments)
        runs = {name: open_run(path) for name, path in names_of(arguments.directories).items()}
        tables = {name: _tables(run, network=arguments.network) for name, run in runs.items()}
        (_print_json if arguments.json else _print_text)(arguments, runs, tables)
        return 0


def _write_page(arguments: argparse.Namespace) -> int:
    from commtrace.analyses.comparison import names_of
    from commtrace.analyses.report.html.page import SITES, page_of_run, page_of_runs
    from commtrace.output_files import atomic_write
    from commtrace.run import open_run

    runs = {name: open_run(path) for name, path in names_of(arguments.directories).items()}
    tables = {name: _tables(run, details=len(runs) == 1, network=arguments.network) for name, run in runs.items()}
    if len(runs) > 1:
        what, page = f"{len(runs)} runs", page_of_runs(runs, tables)
    else:
        ((name, run),) = runs.items()
        sites = SITES if arguments.sites is None else arguments.sites
        what, page = f"run {run.id}", page_of_run(name, run, tables[name], sites=sites)
    with atomic_write(arguments.html, force=arguments.force) as part:
        part.write_text(page, encoding="utf-8")
    print(f"{arguments.html}: {what}, to be opened in a browser")
    return 0


def _print_json(arguments: argparse.Namespace, runs: Mapping[str, Run], tables: Mapping[str, NamedTables]) -> None:
    """The tables of one run, or those of several side by side."""
    from commtrace.analyses.comparison import compare
    from commtrace.analyses.report.document import comparison_to_json, to_json

    if len(runs) > 1:
        print(comparison_to_json(compare(runs, tables)))
    else:
        ((name, run),) = runs.items()
        print(to_json(run, tables[name]))


def _print_text(arguments: argparse.Namespace, runs: Mapping[str, Run], tables: Mapping[str, NamedTables]) -> None:
    """The report of one run, or what matters of several side by side."""
    from commtrace.analyses.comparison import compare
    from commtrace.analyses.report import side_by_side, terminal
    from commtrace.text_tables import console, stdout_takes_unicode

    width = arguments.width
    letters = stdout_takes_unicode()
    if len(runs) > 1:
        parts = side_by_side.render(compare(runs, tables), width, letters=letters)
    else:
        ((name, run),) = runs.items()
        sites = 10 if arguments.sites is None else arguments.sites
        parts = terminal.render(run, tables[name], width, sites=sites, letters=letters)
    for part in parts:
        console(width).print(part)


def _tables(run: Run, *, details: bool = False, network: str | None = None) -> NamedTables:
    from commtrace.analyses import analyse

    question = None if network is None else _network(network)
    with _executor(run) as executor:
        tables = analyse(run, executor, details=details)
        if question is not None:
            from commtrace.analyses.engine import fold

            tables |= fold(run, [question], executor)
        return tables


def _network(name: str) -> Analysis:
    from commtrace.analyses.network_efficiency import network_analysis
    from commtrace.network.networks import open_network

    return network_analysis(open_network(name))


@contextlib.contextmanager
def _executor(run: Run) -> Iterator[Executor | None]:
    """Worker processes where there is much to read, else None."""
    records = sum(segment.count for process in run.processes for segment in process.segments)
    if records < PARALLEL_FROM or usable_cores() < 2:
        yield None
        return
    try:
        # A fork has pandas imported already, which takes a second, but copies the locks of other threads.
        how = multiprocessing.get_context("fork" if threading.active_count() == 1 else "spawn")
        with ProcessPoolExecutor(min(usable_cores(), 16), how) as executor:
            yield executor
    except BrokenProcessPool:
        raise CommtraceError(f"{run.log.path}: a worker process was killed, probably for want of memory") from None
