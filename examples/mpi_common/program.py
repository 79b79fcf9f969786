"""Start and end of an MPI example: rank 0 prints errors, and a failure on one rank ends all."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from commtrace.errors import CommtraceError


def run(name: str, work: Callable[[Sequence[str], Any], int], argv: Sequence[str] | None) -> int:
    """Run `work(argv, comm)` on every rank of COMM_WORLD.

    A CommtraceError is the same on all ranks and raised before anything starts: all return, and rank 0 prints it. Any
    other exception on one rank aborts all, because the others may wait in a collective that it will never join.

    Returns:
        The status of `work`, or 2 for a CommtraceError.
    """
    from mpi4py import MPI  # starts MPI

    comm = MPI.COMM_WORLD
    try:
        return work(sys.argv[1:] if argv is None else argv, comm)
    except CommtraceError as error:
        if comm.Get_rank() == 0:
            print(f"{name}: error: {error}", file=sys.stderr, flush=True)
        return 2
    except Exception:
        # At once: the launcher may end this process before it has read a second piece.
        sys.stderr.write(traceback.format_exc())
        sys.stderr.flush()
        comm.Abort(1)
        return 1
