"""Recover records of killed processes from this host's shared memory.

The last records of a killed process are in /dev/shm. They are recovered on this
host by every command that opens the log (report, check, diff, scaling, export,
pack) and by any process of the run that exits normally. `commtrace.open` reads
them there and moves them only with `recover=True`.
On the other hosts of a cluster, run this command before they are rebooted or
/dev/shm is cleaned: `srun --ntasks-per-node=1 commtrace recover logs/run1`.
"""

from __future__ import annotations

import argparse

from commtrace.errors import LogError

from .option_types import add_shared


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_shared(parser, "directory")


def run(arguments: argparse.Namespace) -> int:
    """Recover the records, and print what was recovered."""
    from commtrace.reading.log import recovery_note
    from commtrace.recording.recovery import recover_records

    notes = [recovery_note(arguments.directory, recovery).text for recovery in recover_records(arguments.directory)]
    if not notes and not arguments.directory.exists():
        raise LogError(f"{arguments.directory}: no such directory, and no records for it in this host's shared memory")
    print("\n".join(notes) if notes else f"no records in this host's shared memory for {arguments.directory}")
    return 0
