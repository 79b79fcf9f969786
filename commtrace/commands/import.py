"""Import what other tools have recorded, as a log that every command reads.

PATH is a file, or a directory with the files of all ranks. The format is told
from the contents; --format names it where it cannot be told, or chooses one of
several in a directory:

  kineto            traces of torch.profiler: .json, .json.gz
  execution-trace   execution traces of torch.profiler; beside its traces, they
                    add what those do not state
  flight-recorder   dumps of PyTorch's NCCL flight recorder: pickle or JSON
  nccl-inspector    JSON lines of the NCCL or RCCL Inspector: .log, .jsonl, .gz
  deepspeed-comms   DeepSpeed's CommsLogger: the output of log_summary(), or its
                    dictionaries as JSON
  mpip              reports of mpiP

The log in OUT is marked with its source. What the source does not state (the
payload of a call in old traces, for example) is missing in every table, and the
report lists it. Files that are damaged are imported as far as they can be read.
`commtrace report FILE` imports a file on the fly. The extra `import` (orjson)
makes the import of JSON several times faster.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .option_types import add_shared


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    from commtrace.importing.formats import FORMATS

    add = parser.add_argument
    add("paths", metavar="PATH", type=Path, nargs="+", help="file or directory of another tool; all become one run")
    add("--out", metavar="OUT", type=Path, required=True, help="directory to write")
    add("--format", choices=[known.name for known in FORMATS], help="format of all files (default: told from each)")
    add_shared(parser, "--force")


def run(arguments: argparse.Namespace) -> int:
    """Import the files, and print what was imported."""
    from commtrace.formatting import format_plural
    from commtrace.importing.formats import format_named
    from commtrace.importing.import_run import import_files

    named = format_named(arguments.format) if arguments.format else None
    imported = import_files(arguments.paths, arguments.out, named, force=arguments.force)
    for problem in imported.problems:
        print(f"commtrace: {problem}", file=sys.stderr)
    ranks = format_plural(len(imported.ranks), "rank")
    print(f"{arguments.out}: {format_plural(imported.calls, 'call')} of {ranks}")
    return 0
