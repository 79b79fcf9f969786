"""Command line of the example."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from commtrace.commands.option_types import positive_integer
from examples.mpi_common.options import Parser, add_common

from .attention import ATTENTIONS
from .layer import SequenceShape

DESCRIPTION = """A Transformer layer on an input divided along the sequence, on every rank of mpiexec:

    mpiexec -n 4 python -m examples.mpi_sequence_parallel --attention ring

The configuration of transformer-sequence-parallelism (11.7 TFLOP per pass, for GPUs):

    --hidden 5120 --heads 40 --sequence 4096 --batch 4 --iterations 10 --forward-only"""


def parse(argv: Sequence[str], rank: int) -> Namespace:
    """Parse the options; rank 0 prints errors, which end all ranks."""
    parser = Parser(rank, prog="python -m examples.mpi_sequence_parallel", description=DESCRIPTION)
    add = parser.add_argument
    add("--attention", choices=tuple(ATTENTIONS), default="all_gather", help="scheme (default: %(default)s)")
    add("--batch", type=positive_integer, default=2, metavar="N", help="rows (default: %(default)s)")
    add("--sequence", type=positive_integer, default=512, metavar="N", help="tokens of a row (default: %(default)s)")
    add("--hidden", type=positive_integer, default=256, metavar="N", help="features of a token (default: %(default)s)")
    add("--heads", type=positive_integer, default=8, metavar="N", help="(default: %(default)s)")
    add("--feed-forward", type=positive_integer, metavar="N", help="its hidden size (default: 4 times --hidden)")
    add_common(parser, iterations=10, dropout=0.0)
    return parser.parse_args(argv)


def shape_of(options: Namespace) -> SequenceShape:
    """Return the sizes that the options give."""
    feed_forward = options.feed_forward or 4 * options.hidden
    return SequenceShape(options.batch, options.sequence, options.hidden, options.heads, feed_forward)
