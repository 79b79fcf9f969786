"""Strong scaling of the sequence-parallel layer on this machine: `python -m examples.mpi_sequence_parallel.scaling`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from examples.mpi_common import scaling

from .options import parse, shape_of

# From the README of github.com/harshita-mp/transformer-sequence-parallelism, "Raw Results".
PUBLISHED: Final = """\
Published by transformer-sequence-parallelism: GPUs of one node with MPI through host memory, hidden 5120, sequence
4096, batch 4, means of 10 forward passes. It has no times of parts and attributes the slowdown to communication.

ranks  time (s)  speedup  efficiency  tokens/s
1         0.947    1.00x        100%    17,295
2         0.816    1.16x         58%    20,072
4         1.010    0.94x         23%    16,218"""


def _tokens(argv: Sequence[str]) -> int:
    shape = shape_of(parse(argv, 0))
    return shape.batch * shape.sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return scaling.run("mpi_sequence_parallel", argv, PUBLISHED, _tokens)


if __name__ == "__main__":
    sys.exit(main())
