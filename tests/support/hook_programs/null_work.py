"""python null_work.py FOLDER BUILD: calls on a backend that returns no Work where NCCL returns none (one process)."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.utils.cpp_extension import load

dist: Any = torch.distributed  # its stubs are incomplete

SOURCE = Path(__file__).with_name("null_work_backend.cpp")

backend: Any = load("null_work_backend", [str(SOURCE)], build_directory=sys.argv[2], extra_cflags=["-O0"])
dist.Backend.register_backend(
    "nullwork", lambda store, rank, size, timeout: backend.create(rank, size), devices=["cpu"]
)
cases: dict[str, dict[str, Any]] = {}


def case(function: Callable[[], Any]) -> None:
    begin = time.monotonic_ns()
    result = function()
    cases[function.__name__] = {"begin": begin, "end": time.monotonic_ns(), "tells": result}


dist.init_process_group("nullwork", store=dist.HashStore(), rank=0, world_size=2)
CPU = torch.device("cpu")


@case
def first_batch() -> None:
    """The first calls of the program are coalesced."""
    with _coalescing_manager(device=CPU, async_ops=True) as manager:
        dist.broadcast(torch.ones(2), 0)
        dist.broadcast(torch.ones(3), 0)
    manager.wait()


@case
def synchronous() -> None:
    dist.all_reduce(torch.ones(4))
    dist.all_gather([torch.zeros(4), torch.zeros(4)], torch.ones(4))
    dist.all_gather_into_tensor(torch.zeros(8), torch.ones(4))
    dist.reduce_scatter_tensor(torch.zeros(4), torch.ones(8))
    dist.all_to_all([torch.zeros(4), torch.zeros(1)], [torch.ones(4), torch.ones(3)])
    dist.barrier()


@case
def nothing_is_given() -> bool:
    return dist.all_reduce(torch.ones(4)) is None


@case
def asynchronous() -> Any:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    assert work.get_future().done()  # done at launch, before the call is complete
    assert not work.is_completed()
    return work.wait()


@case
def future_only() -> None:
    work = dist.all_reduce(torch.ones(5), async_op=True)
    work.get_future().wait()
    del work
    dist.barrier()


@case
def batch_of_messages() -> None:
    operations = [dist.P2POp(dist.isend, torch.ones(6), 1), dist.P2POp(dist.irecv, torch.zeros(6), 1)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


@case
def batch_without_wait() -> None:
    with _coalescing_manager(device=CPU):
        dist.broadcast(torch.ones(7), 0)
        dist.broadcast(torch.ones(8), 0)


@case
def abandoned_batch() -> None:
    try:
        with _coalescing_manager(device=CPU):
            dist.broadcast(torch.ones(9), 0)
            raise KeyError
    except KeyError:
        dist.group.WORLD._end_coalescing(CPU)
        dist.distributed_c10d._world.pg_coalesce_state.clear()
    dist.broadcast(torch.ones(10), 0)


@case
def polled() -> None:
    work = dist.all_reduce(torch.ones(11), async_op=True)
    assert not work.is_completed()
    backend.finish()
    assert work.is_completed()


@case
def complete_at_once() -> None:
    work = dist.all_reduce(torch.ones(12), async_op=True)
    assert work.get_future().done()
    work.wait()


(Path(sys.argv[1]) / f"rank{os.environ['RANK']}.json").write_text(json.dumps(cases))
dist.destroy_process_group()
