"""Write a log as a Parquet data set for commtrace and other programs.

Each run of the log becomes a few files, whatever its number of ranks: the event
table, sorted by rank, with row-group statistics, and in `_processes` the tables
of the processes. report, check, diff, scaling and export read the directory in
place of the log, with the same results, except that the last calls of a run
with COMMTRACE_STEPS are not packed. Runs with COMMTRACE_MODE=summary cannot be
packed. pandas, polars, DuckDB and Dask read the files directly. The tables of
reports are stored, too, so that `commtrace report` takes seconds. Records
of killed processes are first recovered into the log; nothing else in it
changes. The command needs the extra `parquet` (pyarrow).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .option_types import add_shared


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_shared(parser, "directory")
    parser.add_argument("--out", metavar="OUT", type=Path, help="directory to write (default: DIR.packed)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is a packed log")
    add_shared(parser, "--dask")


def run(arguments: argparse.Namespace) -> int:
    """Pack the log, and print damage in it to stderr."""
    from commtrace.analyses import tables_to_store
    from commtrace.analyses.analysed_run import code_digest
    from commtrace.formatting import format_bytes, format_plural
    from commtrace.reading.executors import open_executor
    from commtrace.reading.log_notes import print_notes
    from commtrace.reading.pack import TablesToStore, pack

    directory: Path = arguments.directory.expanduser().resolve()
    out = arguments.out or directory.with_name(f"{directory.name}.packed")
    to_store = TablesToStore(tables_to_store, code_digest())
    with open_executor(arguments.dask) as executor:
        packed = pack(arguments.directory, out, force=arguments.force, executor=executor, to_store=to_store)
    print_notes(packed.notes)
    sizes = f"{format_bytes(packed.packed_bytes)}; the log has {format_bytes(packed.log_bytes)}"
    print(f"{out}: {format_plural(packed.rows, 'call')} of {format_plural(packed.runs, 'run')}, {sizes}")
    return 0
