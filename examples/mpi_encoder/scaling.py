"""Speedups of the encoder and its sub-layers on this machine: `python -m examples.mpi_encoder.scaling`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from examples.mpi_common import scaling

from .layers import PARTS

PUBLISHED: Final = (
    'Published in "Parallelizing Transformer with Model, Tensor Model and Pipeline Parallelism": speedups of\n'
    "attention, feed-forward and the encoder layer, forward, on 2, 4 and 8 MPI workers, with model 512, hidden 2048,\n"
    "batch 10 and 8 heads. They are in a figure only; their numbers and the length of the sequence are not given."
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command: the status of the first run that failed, else 0."""
    return scaling.run("mpi_encoder", argv, PUBLISHED, PARTS)


if __name__ == "__main__":
    sys.exit(main())
