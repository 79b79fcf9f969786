"""Write every call of a run to a CSV or Parquet file.

One row per call, with the columns of the event table: rank, operation, group, role, bytes, times, step, phase,
call site and so on. Times are nanoseconds of the host's monotonic clock; 0 means not known. In
peer, tag and micro_batch, -1 means none or not known; in step, before the first step. Unknown wire_bytes and
group_size are empty. Memory use is independent of the size of the log. Parquet needs the extra `parquet` (pyarrow).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .option_types import add_shared


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_shared(parser, "directory")
    add = parser.add_argument
    add("--format", choices=("csv", "parquet"), help="file format (default: from the file extension)")
    add("--out", metavar="FILE", type=Path, required=True, help="file to write")
    add_shared(parser, "--force")


def run(arguments: argparse.Namespace) -> int:
    """Write the file, and print damage in the log to stderr."""
    from commtrace.errors import OutputError
    from commtrace.reading.export import WRITERS, export
    from commtrace.run import open_run

    out: Path = arguments.out
    form = arguments.format or out.suffix.lstrip(".").lower()
    if form not in WRITERS:
        raise OutputError(f"{out}: unknown file extension; add --format csv or --format parquet")
    run = open_run(arguments.directory)
    rows = export(run, out, form, force=arguments.force)
    for note in run.notes:
        print(f"commtrace: {note}", file=sys.stderr)
    print(f"{out}: {rows:,} calls of run {run.id}")
    return 0
