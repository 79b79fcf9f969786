"""Compare runs at increasing scale, and show what limits the scaling.

All runs must be of the same program. For each run, the report shows the time of a
training step, speedup and efficiency relative to the run with the fewest ranks,
tokens per second, the parts of the step time (computation, communication,
waiting for late ranks), and the bytes that a rank sends, compared with theory.
It then fits Amdahl's law and a latency-bandwidth model, and shows the errors of
the fits and their predictions for more ranks. Steps are marked by the program
or detected by commtrace.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .option_types import add_formats, add_shared, positive_integer
from .report import print_text, write_page


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add = parser.add_argument
    add("directories", metavar="DIR", type=Path, nargs="+", help="log directories, one per run; two or more")
    add("--tokens", metavar="N", type=positive_integer, action="append",
        help="tokens per step of the whole job, if not in the log; once for all runs, or once per run")  # fmt: skip
    add_formats(parser)
    add_shared(parser, "--per-rank", "--dask", "--width")


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison, or write the page."""
    from commtrace.analyses.scaling.findings import sentences
    from commtrace.analyses.scaling.scaling_tables import scaling
    from commtrace.analyses.side_by_side import short_names
    from commtrace.reading.executors import open_executor
    from commtrace.reading.log_notes import print_notes
    from commtrace.run import open_run

    with open_executor(arguments.dask) as executor:
        runs = {
            name: open_run(path, recover=True, executor=executor)
            for name, path in short_names(arguments.directories).items()
        }
        try:
            tables = scaling(runs, arguments.tokens)
        finally:  # damaged records are known only after reading
            print_notes((note for run in runs.values() for note in run.notes), per_rank=arguments.per_rank)
    if arguments.html is not None:
        from commtrace.analyses.report.html.page_contents import page_of_scaling

        write_page(arguments, page_of_scaling(runs, tables, sentences(tables)), f"{len(runs)} runs")
    elif arguments.json:
        from commtrace.analyses.report.document import scaling_to_json

        print(scaling_to_json(tables, sentences(tables), per_rank=arguments.per_rank))
    else:
        from commtrace.analyses.report.several_runs_text import render_scaling

        print_text(render_scaling(tables, sentences(tables), arguments.width), arguments.width)
    return 0
