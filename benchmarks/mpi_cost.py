"""What tracing adds to calls of mpi4py, in us: an Allreduce of 8 bytes, and a message of 8 bytes there and back.

On two ranks the difference is what a program waits; ranks that share a core wait for each other's turn, too,
which the control shows. On one rank, alone in MPI.COMM_SELF, what is left is the way into mpi4py, and tracing.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import mpi_groups
import numpy as np
import results
from measuring import Round, Row, compared, in_turn

import commtrace
from commtrace.hooks.native import libraries

Call = Callable[[], object]
Switch = Callable[[], AbstractContextManager[object]]


def main() -> None:
    """Measure."""
    parser = results.parser(__doc__, pairs=36, settle=0.03)
    parser.add_argument("--calls", type=int, default=2000, help="calls of one block")
    options = results.parsed(parser, calls=20)
    if not mpi_groups.inside():
        libraries.MPI.build()
    results.write("mpi_cost", mpi_groups.run(calls, options), options)


def calls(options: argparse.Namespace) -> list[Row]:
    """What a rank does."""
    from mpi4py import MPI

    world: Any = MPI.COMM_WORLD
    given, into = np.ones(1), np.zeros(1)
    # Methods are looked up with each call: one that was bound before tracing began is the original.
    vendor = MPI.get_vendor()[0]
    rows: list[Row] = []
    for case, call in (
        ("Allreduce alone", lambda: MPI.COMM_SELF.Allreduce(given, into)),
        ("Allreduce, two ranks", lambda: world.Allreduce(given, into)),
        ("Send and Recv, round trip, two ranks", partial(ping, world, given, into)),
    ):
        for name, switch in sides().items():
            if options.only in name:
                rows.append(measure(f"{case}, 8 bytes, {vendor}", name, switch, call, world, options))
    return rows


def ping(world: Any, given: Any, into: Any) -> None:
    """One Send and one Recv on each rank: four calls, one after the other."""
    if world.Get_rank() == 0:
        world.Send(given, 1)
        world.Recv(into, 1)
    else:
        world.Recv(into, 0)
        world.Send(given, 0)


def sides() -> dict[str, Switch]:
    """Each recorder, with and without call sites."""
    return {
        f"commtrace, {recorder}, {words} call sites": partial(traced, recorder, sites)
        for recorder in ("python", "native")
        for sites, words in ((1, "with"), (0, "without"))
    }


@contextmanager
def traced(recorder: str, sites: int) -> Iterator[None]:
    """commtrace, into a log that is removed afterwards. Raises AssertionError where it has seen nothing."""
    os.environ["COMMTRACE_RECORDER"], os.environ["COMMTRACE_SITES"] = recorder, str(sites)
    with tempfile.TemporaryDirectory() as directory:
        commtrace.start(directory)
        try:
            yield
        finally:
            commtrace.stop()
        (process,) = commtrace.open(directory).processes
        stats = process.tables.stats or {}
        assert int(str(stats["calls"])) > 0, stats
        assert not stats["hook_errors"], stats["first_error"]


def measure(case: str, name: str, switch: Switch, call: Call, world: Any, options: argparse.Namespace) -> Row:
    """Bare, bare again and switched on in turn; of a block the slower rank counts."""
    from mpi4py import MPI

    def block(switched: Switch) -> float:
        with switched():
            call()
            time.sleep(options.settle)
            call()
            world.Barrier()
            begun = time.perf_counter()
            for _ in range(options.calls):
                call()
            took = (time.perf_counter() - begun) / options.calls
        return float(world.allreduce(took, MPI.MAX)) * 1e6

    rounds = in_turn(lambda: block(nullcontext), lambda: block(switch), options.pairs)
    row = compared(case, name, "us", [Round(*one) for one in rounds])
    if world.Get_rank() == 0:
        results.show(row)
    return row


if __name__ == "__main__":
    main()
