"""Run several MPI workloads in the same ranks, because importing torch takes seconds: workloads.py CASES [LOGS].

CASES is a JSON list of [workload, options, whether tensors are staged as for a GPU]. Rank 0 writes a line of JSON per
case: what each rank reported. With LOGS, each case runs twice, first untraced and then traced into LOGS/0, LOGS/1 and
so on, and each rank reports two results.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from mpi4py import MPI

import commtrace
from examples.mpi_common.options import make_transport

# Index of the argument that is the payload: for all_gather the receive buffer, for other collectives the send buffer.
PAYLOAD = {
    "Allgather": ("all_gather", 1),
    "Reduce_scatter_block": ("reduce_scatter", 0),
    "Alltoall": ("all_to_all", 0),
    "Allreduce": ("all_reduce", 0),
    "Isend": ("send", 0),
    "Irecv": ("recv", 0),
    "Recv": ("recv", 0),
}
MOVES_NO_TENSOR = ("Get_rank", "Get_size", "Barrier", "bcast")


class CountingComm:
    """A communicator that counts calls by operation and payload, and rejects methods that it cannot count."""

    def __init__(self, comm: MPI.Comm, counts: Counter[tuple[str, int]]) -> None:
        self.comm, self.counts = comm, counts

    def Split(self, color: int, key: int) -> CountingComm:  # noqa: N802
        return CountingComm(self.comm.Split(color, key), self.counts)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self.comm, name)
        if name in MOVES_NO_TENSOR:
            return method
        op, which = PAYLOAD[name]

        def counted(*arguments: Any) -> Any:
            self.counts[op, arguments[which].nbytes] += 1
            return method(*arguments)

        return counted


def run(workload: str, arguments: list[str], staged: bool) -> dict[str, Any]:
    """Run one case on this rank."""
    package = f"examples.{workload}"
    options = importlib.import_module(f"{package}.options").parse(arguments, MPI.COMM_WORLD.Get_rank())
    counts: Counter[tuple[str, int]] = Counter()
    transport = make_transport(options.transport, CountingComm(MPI.COMM_WORLD, counts), torch.device("cpu"))
    transport.staged = staged
    outcome, _ = importlib.import_module(f"{package}.train").train(options, transport, torch.device("cpu"))
    transport.close()
    counted = [[op, payload, calls] for (op, payload), calls in sorted(counts.items())]
    return {**asdict(outcome), "counted": counted}


def twice(log: str, workload: str, arguments: list[str], staged: bool) -> list[dict[str, Any]]:
    """Run one case on this rank, untraced and traced."""
    untraced = run(workload, arguments, staged)
    commtrace.start(log)
    traced = run(workload, arguments, staged)
    commtrace.stop()
    return [untraced, traced]


def main() -> None:
    """Run all cases."""
    comm = MPI.COMM_WORLD
    for number, case in enumerate(json.loads(sys.argv[1])):
        by_rank = comm.gather(twice(f"{sys.argv[2]}/{number}", *case) if sys.argv[2:] else run(*case))
        if by_rank is not None:
            print(json.dumps(by_rank), flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
