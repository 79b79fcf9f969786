"""Make known calls under torch.profiler, without commtrace: `traced_calls.py FOLDER`, with two ranks.

Each rank writes its trace (`rank0.json.gz`), its execution trace (`rank0.et.json.gz`), and the calls as it made them
(`rank0.calls.json`): step, operation, ranks of the group, payload in bytes, peer.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

dist: Any = torch.distributed
"""Untyped, as versions of torch differ in what they annotate."""


def main(folder: Path) -> None:
    """Make the calls of two steps."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    alone, again = dist.new_group([0]), dist.new_group([0, 1])
    calls: list[tuple[int, str, list[int], int, int]] = []
    observer = ExecutionTraceObserver()
    execution_trace = folder / f"rank{rank}.et.json"
    observer.register_callback(str(execution_trace))
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=0, active=2, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(folder / f"rank{rank}.json.gz")),
        record_shapes=True,
        execution_trace_observer=observer,
    ) as profiler:
        for step in range(2):
            for op, ranks, payload, peer in step_of(rank, alone, again):
                calls.append((step, op, ranks, payload, peer))
            profiler.step()
    observer.unregister_callback()
    with gzip.open(f"{execution_trace}.gz", "wb") as file:
        file.write(execution_trace.read_bytes())
    execution_trace.unlink()
    (folder / f"rank{rank}.calls.json").write_text(json.dumps(calls))
    dist.destroy_process_group()


def step_of(rank: int, alone: Any, other: Any) -> Any:
    """Make the calls of a step, and yield each: operation, ranks, payload, and peer or root (-1: none)."""
    both, size = [0, 1], 1000
    single = torch.ones(size)
    dist.all_reduce(single)
    yield "all_reduce", both, 4 * size, -1
    work = dist.all_reduce(torch.ones(size, dtype=torch.bfloat16), group=other, async_op=True)
    work.wait()
    yield "all_reduce", both, 2 * size, -1
    dist.broadcast(torch.ones(30, dtype=torch.int64), src=1)
    yield "broadcast", both, 8 * 30, 1
    dist.reduce(torch.ones(50), dst=0)
    yield "reduce", both, 4 * 50, 0
    dist.all_gather([torch.empty(20), torch.empty(20)], torch.ones(20))
    yield "all_gather", both, 4 * 40, -1
    dist.all_gather_into_tensor(torch.empty(60), torch.ones(30), group=other)
    yield "all_gather", both, 4 * 60, -1
    dist.gather(torch.ones(25), [torch.empty(25), torch.empty(25)] if rank == 0 else None, dst=0)
    yield "gather", both, 4 * 50, 0
    dist.scatter(torch.empty(15), [torch.ones(15), torch.ones(15)] if rank == 1 else None, src=1)
    yield "scatter", both, 4 * 30, 1
    dist.all_to_all_single(torch.empty(80), torch.ones(80))
    yield "all_to_all", both, 4 * 80, -1
    splits = [[10, 30], [20, 5]]
    received, sent = [splits[0][rank], splits[1][rank]], splits[rank]
    dist.all_to_all_single(torch.empty(sum(received)), torch.ones(sum(sent)), received, sent)
    yield "all_to_all", both, 4 * sum(sent), -1
    if rank == 0:
        dist.all_reduce(torch.ones(7), group=alone)
        yield "all_reduce", [0], 4 * 7, -1
        dist.send(torch.ones(12), 1)
        yield "send", both, 4 * 12, 1
    else:
        dist.recv(torch.empty(12), 0)
        yield "recv", both, 4 * 12, 0
    message = torch.ones(9)
    works = [dist.isend(message, 1 - rank, tag=3), dist.irecv(torch.empty(9), 1 - rank, tag=3)]
    for pending in works:
        pending.wait()
    yield "send", both, 4 * 9, 1 - rank
    yield "recv", both, 4 * 9, 1 - rank
    dist.barrier()
    yield "barrier", both, 0, -1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
