"""Show what a run communicated.

The report shows, in this order: warnings, if data is incomplete or unreliable;
findings; the comparison of the run with theory; volumes by operation, parallel
dimension, phase, step and call site; bandwidth; load balance across ranks; the
coverage of the log, the cost of tracing, and the blind spots of the hooks. If
DIR has several runs, the newest is shown. For a damaged log, the report covers
the part that can be read. Several DIRs are shown side by side.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from commtrace.errors import CommtraceError
from commtrace.output_files import atomic_write

from .option_types import add_formats, add_shared, non_negative_integer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from commtrace.analyses.fold_engine import Analysis, NamedTables
    from commtrace.run import Run


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("directories", metavar="DIR", type=Path, nargs="+",
        help="log directory, as in COMMTRACE, or one run's directory in it; several: runs side by side")  # fmt: skip
    add_formats(parser)
    add_shared(parser, "--network", purpose="compare call times with those expected on a network")
    parser.add_argument("--sections", metavar="NAME,...", type=section_names,
        help="sections of the text report to show, such as theory,steps; all: every section (default: "
        "those that the last line of the report does not list)")  # fmt: skip
    parser.add_argument("--sites", metavar="N", type=non_negative_integer,
        help="number of call sites to show; 0: all (default: 10; 40 in HTML)")  # fmt: skip
    add_shared(parser, "--per-rank", "--dask", "--width")


def run(arguments: argparse.Namespace) -> int:
    """Print the report, or write the page."""
    from commtrace.analyses.analysis_catalog import SECTIONS
    from commtrace.analyses.report import document, several_runs_text, terminal
    from commtrace.analyses.side_by_side import compare, short_names
    from commtrace.reading.executors import open_executor
    from commtrace.run import open_run

    several = len(arguments.directories) > 1
    if arguments.network is not None and several:
        raise CommtraceError("--network compares one run with a network; give one directory")
    if arguments.sections is not None and (several or arguments.json or arguments.html is not None):
        raise CommtraceError("--sections is for the text of one run; leave it out with --json, --html or several DIRs")
    if arguments.html is not None:
        from commtrace.analyses.report.html import page_contents  # raises if a library is not installed
    details = arguments.html is not None and not several
    chosen = [section for section in SECTIONS if section.name in (arguments.sections or ())]
    full = not several and (arguments.json or details or any(section.on_request for section in chosen))
    include_matching_steps = several or arguments.json or details
    with open_executor(arguments.dask) as executor:
        runs = {
            name: open_run(path, recover=True, executor=executor)
            for name, path in short_names(arguments.directories).items()
        }
        tables = {
            name: _tables(
                run,
                details=details,
                across_ranks=full,
                include_matching_steps=include_matching_steps,
                network=arguments.network,
            )
            for name, run in runs.items()
        }
    width, per_rank = arguments.width, arguments.per_rank
    if several:
        compared, warnings = compare(runs, tables), several_runs_text.warnings_of_runs(runs, tables)
        if arguments.html is not None:
            write_page(arguments, page_contents.page_of_runs([*runs], compared, warnings), f"{len(runs)} runs")
        elif arguments.json:
            print(document.comparison_to_json(compared))
        else:
            print_text(several_runs_text.render_side_by_side(compared, width, warnings=warnings), width)
        return 0
    ((name, run),) = runs.items()
    sites = {} if arguments.sites is None else {"sites": arguments.sites}
    if arguments.html is not None:
        page_text = page_contents.page_of_run(name, run, tables[name], per_rank=per_rank, **sites)
        write_page(arguments, page_text, f"run {run.id}")
    elif arguments.json:
        print(document.report_to_json(run, tables[name], per_rank=per_rank))
    else:
        shown = {"sections": arguments.sections, "per_rank": per_rank, **sites}
        print_text(terminal.render(run, tables[name], width, **shown), width)
    return 0


def page_of_log(directory: Path, state: str) -> str:
    """Return the page of --html of one run, with a line on its state; nothing is written.

    Raises:
        LogError: There is no run that can be read.
        MissingLibraryError: A library that draws pages is not installed.
    """
    from commtrace.analyses.report.html.page_contents import page_of_run
    from commtrace.analyses.side_by_side import short_names
    from commtrace.run import open_run

    (name,), run = short_names([directory]), open_run(directory)
    tables = _tables(run, details=True, across_ranks=True, include_matching_steps=True)
    return page_of_run(name, run, tables, state=state)


def section_names(text: str) -> tuple[str, ...]:
    """Parse names of sections, separated by commas; "all" selects all of them."""
    from commtrace.analyses.analysis_catalog import SECTIONS

    known = [section.name for section in SECTIONS]
    names = known if text == "all" else text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"no section is called {name!r}; give all, or some of {', '.join(known)}")
    return tuple(names)


def write_page(arguments: argparse.Namespace, page: str, shown: str) -> None:
    """Write a page to the file of --html, and print what it shows."""
    with atomic_write(arguments.html, force=arguments.force) as part:
        part.write_text(page, encoding="utf-8")
    print(f"{arguments.html}: {shown}; open it in a browser")


def print_text(renderables: Iterable[RenderableType], width: int) -> None:
    """Print rich renderables at the given width."""
    from commtrace.text_tables import console

    for renderable in renderables:
        console(width).print(renderable)


def _tables(
    run: Run, *, details: bool, across_ranks: bool, include_matching_steps: bool, network: str | None = None
) -> NamedTables:
    from commtrace.analyses import analyse

    return analyse(
        run,
        details=details,
        across_ranks=across_ranks,
        include_matching_steps=include_matching_steps,
        others=_network_analyses(network),
    )


def _network_analyses(network: str | None) -> list[Analysis]:
    """Return the analysis that compares a run with a network, if one is given."""
    if network is None:
        return []
    from commtrace.analyses.network_efficiency import network_analysis
    from commtrace.network.networks import open_network

    return [network_analysis(open_network(network))]
