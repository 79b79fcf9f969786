"""Entry point of `mpiexec -n 4 python -m examples.mpi_encoder`; see `options`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from examples.mpi_common import program

from .train import command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 if results differ from one process, or 2 for invalid options."""
    return program.run("encoder", command, argv)


if __name__ == "__main__":
    sys.exit(main())
