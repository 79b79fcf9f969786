"""Write a log as a Parquet data set, which every command and other programs read.

All runs of the log are packed, in a few files each, however many ranks they have: the columns of the event table,
sorted by rank, with statistics, and in `_processes` the tables of the processes. `commtrace report` and the other
commands read the directory in place of the log, with equal results; pandas, polars, DuckDB and Dask read it as it is.
The tables of a report are stored too, so that it takes seconds. The log does not change. Needs the extra `parquet`
(pyarrow).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .option_types import add_shared


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_shared(parser, "directory")
    parser.add_argument(
        "--out", metavar="OUT", type=Path, help="directory to write (default: the name of DIR and .packed, beside it)"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it is a packed log")
    add_shared(parser, "--dask")


def run(arguments: argparse.Namespace) -> int:
    """Pack the log, and print damage in it to stderr."""
    from commtrace.analyses import tables_to_store
    from commtrace.analyses.fold_engine import code_digest
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
