"""Time that tracing adds to calls of mpi4py, in us: an Allreduce of 8 bytes, and a message of 8 bytes there and back.

On two ranks, the difference is the time that a program waits; ranks that share a core also wait for each other's time
slices, as the control shows. In MPI.COMM_SELF, only the cost of mpi4py and of tracing is measured.
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
    """Run the benchmark and write its results."""
    parser = results.parser(__doc__, pairs=36, settle=0.03)
    parser.add_argument("--calls", type=int, default=2000, help="calls per block")
    options = results.parsed(parser, calls=20)
    if not mpi_groups.inside():
        libraries.MPI.build()
    results.write("mpi_cost", mpi_groups.run(calls, options), options)


def calls(options: argparse.Namespace) -> list[Row]:
    """Return the rows that a rank measures."""
    from mpi4py import MPI

    world: Any = MPI.COMM_WORLD
    sent, received = np.ones(1), np.zeros(1)
    # Each call looks up its method: one that was bound before tracing began is the original.
    vendor = MPI.get_vendor()[0]
    rows: list[Row] = []
    for case, call in (
        ("Allreduce alone", lambda: MPI.COMM_SELF.Allreduce(sent, received)),
        ("Allreduce, two ranks", lambda: world.Allreduce(sent, received)),
        ("Send and Recv, round trip, two ranks", partial(round_trip, world, sent, received)),
    ):
        for name, switch in sides().items():
            if options.only in name:
                rows.append(measure(f"{case}, 8 bytes, {vendor}", name, switch, call, world, options))
    return rows


def round_trip(world: Any, sent: Any, received: Any) -> None:
    """Make one Send and one Recv on each rank: four calls, one after the other."""
    if world.Get_rank() == 0:
        world.Send(sent, 1)
        world.Recv(received, 1)
    else:
        world.Recv(received, 0)
        world.Send(sent, 0)


def sides() -> dict[str, Switch]:
    """Return each recorder, with and without call sites."""
    return {
        f"commtrace, {recorder}, {preposition} call sites": partial(traced, recorder, sites)
        for recorder in ("python", "native")
        for sites, preposition in ((1, "with"), (0, "without"))
    }


@contextmanager
def traced(recorder: str, sites: int) -> Iterator[None]:
    """Trace into a log that is removed afterwards. Raise AssertionError if nothing was recorded."""
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
    """Measure bare, bare again and switched on in turn; the slower rank determines a block's time."""
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
    row = compared(case, name, "us", [Round(*times) for times in rounds])
    if world.Get_rank() == 0:
        results.show(row)
    return row


if __name__ == "__main__":
    main()
