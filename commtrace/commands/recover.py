"""Recover records of killed processes from this host's shared memory.

The last records of a killed process are in /dev/shm. Every command that opens the log (report, scaling, check and
its --against, diff, export) recovers the records on the host that it runs on, and so does any process of the run
that exits normally. On the other hosts of a cluster, run this command before they are restarted or cleaned:
`srun --ntasks-per-node=1 commtrace recover logs/run1`.
"""

from __future__ import annotations

import argparse

from .option_types import add_shared


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_shared(parser, "directory")


def run(arguments: argparse.Namespace) -> int:
    """Recover the records, and print what was recovered."""
    from commtrace.recording.recovery import recover_records

    notes = recover_records(arguments.directory)
    print("\n".join(notes) if notes else f"no records in this host's shared memory for {arguments.directory}")
    return 0
