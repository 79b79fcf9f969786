"""The table of transformer-sequence-parallelism, made on this machine: `python -m ...sequence_parallel.scaling`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from examples.mpi_common import scaling, tables

PUBLISHED: Final = (
    # GPUs, seconds, speedup, efficiency, tokens a second
    ("1", "0.947", "1.00x", "100%", "17,295"),
    ("2", "0.816", "1.16x", "58%", "20,072"),
    ("4", "1.010", "0.94x", "23%", "16,218"),
)
"""From the README of github.com/harshita-mp/transformer-sequence-parallelism, "Raw Results": hidden 5120, sequence
4096, batch 4, means of 10 forward passes; GPUs of one node, MPI by way of the host."""


def published() -> str:
    """The authors' table."""
    title = (
        "Published by transformer-sequence-parallelism: GPUs with MPI by way of the host, hidden 5120, sequence 4096,\n"
        "batch 4, 10 forward passes. The authors measured no parts; they put the slowdown down to communication."
    )
    return f"{title}\n\n{tables.table(['ranks', 'time (s)', 'speedup', 'efficiency', 'tokens/s'], PUBLISHED)}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command: the status of the first run that failed, else 0."""
    return scaling.run("mpi_sequence_parallel", argv, published())


if __name__ == "__main__":
    sys.exit(main())
