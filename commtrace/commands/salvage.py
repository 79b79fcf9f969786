"""`commtrace salvage`."""

from __future__ import annotations

import argparse
from pathlib import Path


class Command:
    """Bring home what killed processes left in this host's memory.

    A process that is killed leaves its last records in /dev/shm. `commtrace report` brings them to the log by itself,
    on the host where it runs, and so does any other process of the run as it ends in order; on the other hosts of a
    cluster this command does, before they are restarted or cleaned:
    `srun --ntasks-per-node=1 commtrace salvage logs/run1`.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument("directory", metavar="DIR", type=Path, help="what COMMTRACE named")

    def run(self, arguments: argparse.Namespace) -> int:
        """Salvage, and say what was found."""
        from commtrace.salvage import salvage

        notes = salvage(arguments.directory)
        print("\n".join(notes) if notes else f"nothing of {arguments.directory} was left in this host's memory")
        return 0
