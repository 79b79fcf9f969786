"""Write every call of a run to a file for other tools.

CSV and Parquet: one row per call, with the columns of the event table (rank,
operation, group, role, bytes, times, step, phase, call site and so on). Times
are in nanoseconds on the host's monotonic clock; 0 means not known. In peer,
tag and micro_batch, -1 means none or not known; in step, before the first step.
Unknown wire_bytes and group_size are empty. Memory use is independent of the
size of the log. Parquet needs the extra `parquet` (pyarrow).

Perfetto: a trace for ui.perfetto.dev. Each rank has a track per thread, a track
of operations in flight, and counters; arrows connect the calls of one
operation. A large run needs --steps and --ranks, because the viewer can open
only about a million calls. Perfetto needs the extra `perfetto`.

Kineto: a folder with a trace per rank as torch.profiler writes it, for HTA,
TraceLens and `commtrace import`; or, named .json or .json.gz, the file of one
rank. Operations that no device measured are marked as "cpu call".

Chakra: a folder with an execution trace per rank for simulators: the last
steps of the run, with the computation between calls and what waits for what.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from .option_types import add_shared, numbers_and_ranges, steps

_FORMATS: Final = {
    "csv": "csv", "parquet": "parquet", "pftrace": "perfetto", "perfetto-trace": "perfetto", "json": "kineto",
    "json.gz": "kineto",
}  # fmt: skip
"""File extension -> format."""


def _names() -> list[str]:
    return sorted({*_FORMATS.values(), "chakra"})


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_shared(parser, "directory")
    add = parser.add_argument
    add("--format", choices=_names(),
        help="file format (default: from the file extension: .csv, .parquet, .pftrace, .json)")  # fmt: skip
    add("--out", metavar="FILE", type=Path, required=True, help="file, or folder, to write")
    add("--ranks", metavar="LIST", type=numbers_and_ranges, help="write only calls of these ranks, such as 0-15,64")
    add("--steps", metavar="LIST", type=steps,
        help="write only calls of these steps, such as 100-110; start-up: calls before the first step")  # fmt: skip
    add("--kept", action="store_true",
        help="with COMMTRACE_MODE=summary or COMMTRACE_STEPS: write only the calls that each process kept in "
        "memory")  # fmt: skip
    add_shared(parser, "--force")


def run(arguments: argparse.Namespace) -> int:
    """Write the file, and print damage in the log to stderr."""
    from commtrace.analyses.chakra_export import export_chakra
    from commtrace.analyses.kineto_export import export_kineto
    from commtrace.analyses.perfetto import export_perfetto
    from commtrace.errors import OutputError
    from commtrace.reading.export import export
    from commtrace.reading.log import kept_log
    from commtrace.reading.log_notes import print_notes
    from commtrace.run import Run, open_run

    out: Path = arguments.out
    extension = max((known for known in _FORMATS if out.name.lower().endswith(f".{known}")), key=len, default="")
    form = arguments.format or _FORMATS.get(extension)
    if form is None:
        raise OutputError(f"{out}: unknown file extension; add --format {', --format '.join(_names())}")
    run = open_run(arguments.directory, recover=True)
    if arguments.kept:
        run = Run(kept_log(run.log))
    selection = {"ranks": arguments.ranks, "steps": arguments.steps, "force": arguments.force}
    exporters = {"perfetto": export_perfetto, "kineto": export_kineto, "chakra": export_chakra}
    rows = exporters[form](run, out, **selection) if form in exporters else export(run, out, form, **selection)
    print_notes(run.notes)
    print(f"{out}: {rows:,} calls of run {run.id}")
    return 0
