"""Strong scaling of the encoder on this machine: `python -m examples.mpi_encoder.scaling`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from examples.mpi_common import scaling

from .options import parse, shape_of

PUBLISHED: Final = (
    'Published in "Parallelizing Transformer with Model, Tensor Model and Pipeline Parallelism": speedups of\n'
    "attention, feed-forward and the encoder layer, forward, on 2, 4 and 8 MPI workers, with model 512, hidden 2048,\n"
    "batch 10 and 8 heads. They are in a figure only; their numbers and the length of the sequence are not given."
)


def _tokens(argv: Sequence[str]) -> int:
    shape = shape_of(parse(argv, 0))
    return shape.batch * shape.sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return scaling.run("mpi_encoder", argv, PUBLISHED, _tokens)


if __name__ == "__main__":
    sys.exit(main())
