"""How an MPI workload starts and ends: one voice for errors, no rank left behind."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from commtrace.errors import CommtraceError


def run(name: str, work: Callable[[Sequence[str], Any], int], argv: Sequence[str] | None) -> int:
    """Do `work(argv, comm)` on every rank of COMM_WORLD; its status, or 2 when it was asked for something impossible.

    What is impossible is so on all ranks alike, before anything starts: all leave, and rank 0 says why. Any other
    exception on one rank ends all, since the others may sit in a collective that it will never join.
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
        traceback.print_exc()
        sys.stderr.flush()
        comm.Abort(1)
        return 1
