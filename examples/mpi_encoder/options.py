"""Command line of the example."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from commtrace.commands.option_types import positive_integer
from examples.mpi_common.options import Parser, add_common

from .layers import EncoderShape
from .schedules import SCHEDULES

DESCRIPTION = """Train a stack of encoder layers, divided among the ranks of mpiexec:

    mpiexec -n 4 python -m examples.mpi_encoder --parallel tensor

tensor    heads and feed-forward divided, products added up by all_reduce (Megatron-LM)
model     heads divided, their outputs put together by all_gather (as Xiao and Ren did); feed-forward as above
pipeline  layers divided, micro-batches passed on

With tensor and model there may be more ranks than heads: ranks then share a head, and add up its scores."""


def parse(argv: Sequence[str], rank: int) -> Namespace:
    """Parse the options; rank 0 prints errors, which end all ranks."""
    parser = Parser(rank, prog="python -m examples.mpi_encoder", description=DESCRIPTION)
    add = parser.add_argument
    add("--parallel", choices=("tensor", "model", "pipeline"), default="tensor", help="(default: %(default)s)")
    add("--schedule", choices=tuple(SCHEDULES), default="gpipe", help="pipeline schedule (default: %(default)s)")
    add("--micro-batches", type=positive_integer, metavar="N", help="(default: 5 with pipeline, else 1)")
    add("--layers", type=positive_integer, default=8, metavar="N", help="(default: %(default)s)")
    add("--batch", type=positive_integer, default=10, metavar="N", help="rows (default: %(default)s)")
    add("--sequence", type=positive_integer, default=32, metavar="N", help="tokens of a row (default: %(default)s)")
    add("--model", type=positive_integer, default=512, metavar="N", help="features of a token (default: %(default)s)")
    add("--hidden", type=positive_integer, default=2048, metavar="N", help="feed-forward size (default: %(default)s)")
    add("--heads", type=positive_integer, default=8, metavar="N", help="(default: %(default)s)")
    add("--classes", type=positive_integer, default=10, metavar="N", help="classes of a token (default: %(default)s)")
    add_common(parser, iterations=5, dropout=0.1)
    return parser.parse_args(argv)


def shape_of(options: Namespace) -> EncoderShape:
    """Return the sizes that the options give."""
    micro_batches = options.micro_batches or (5 if options.parallel == "pipeline" else 1)
    return EncoderShape(
        options.batch,
        options.sequence,
        options.model,
        options.hidden,
        options.heads,
        options.layers,
        options.classes,
        micro_batches,
    )
