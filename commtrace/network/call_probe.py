"""Probe of the hooks: two traced local ranks run every operation once, with known payloads."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Final

from commtrace.operations import MESSAGES

from .bench_operations import BARRIER, COLLECTIVES, PING_PONG, input_elements, output_elements, payload_elements
from .bench_plan import BenchPlan
from .bench_ranks import connect, start_programs
from .process_exit import wait_for_threads

RANKS: Final = 2
_PAYLOAD: Final = 4096
_TIMEOUT_S: Final = 60.0

EXPECTED: Final = Counter((op, _PAYLOAD) for op in (*COLLECTIVES, *MESSAGES))
"""Number of calls of each rank by operation and payload in bytes, without barriers."""


def run_probe(directory: Path, through: str) -> None:
    """Start the ranks, which write their log to a directory, and wait until they have exited.

    Args:
        directory: The log directory.
        through: "torch" or "mpi4py".

    Raises:
        CommtraceError: A rank failed, or there is no mpiexec.
    """
    start_programs(__name__, through, through, RANKS, {"COMMTRACE": str(directory)})


def main() -> int:
    """Run one of the ranks of `run_probe`; return its exit status."""
    library = connect(BenchPlan(through=sys.argv[1], timeout=_TIMEOUT_S))
    group = library.group(range(RANKS))
    assert group is not None
    for op in (*COLLECTIVES, PING_PONG, BARRIER):
        count = payload_elements(op, _PAYLOAD, RANKS) if op != BARRIER else 0
        source, result = (group.buffer(elements(op, count, RANKS)) for elements in (input_elements, output_elements))
        group.call(op, source, result, 1)()
    library.close()
    if "torch" in sys.modules:
        wait_for_threads()
    return 0
