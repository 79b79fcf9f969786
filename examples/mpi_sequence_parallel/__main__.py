"""`mpiexec -n 4 python -m examples.mpi_sequence_parallel ...`: see `options`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from examples.mpi_common import program

from .train import command


def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0 when all is well, 2 when it was asked for something impossible."""
    return program.run("sequence_parallel", command, argv)


if __name__ == "__main__":
    sys.exit(main())
