"""python operators.py FOLDER [BACKEND DEVICE]: three ranks call every operation once, each as a named case.

Writes FOLDER/rank0.json: for each case, the begin and end of its run, its first and last source line, and its result.
BACKEND and DEVICE are gloo and cpu, or nccl and cuda: then all ranks use the first GPU.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.tensor import DTensor, Replicate, Shard

dist: Any = torch.distributed  # its stubs are incomplete

BACKEND, DEVICE = sys.argv[2:] or ("gloo", "cpu")
if DEVICE == "cuda":
    torch.set_default_device("cuda:0")  # of every tensor below
dist.init_process_group(BACKEND)
RANK, RANKS = dist.get_rank(), dist.get_world_size()
cases: dict[str, dict[str, Any]] = {}

NOT_WITH_NCCL = {"all_reduce_sparse", "failing_and_dropped", "monitored_barrier", "recv_from_any"}
"""Cases whose calls only gloo has, or whose failure gloo reports after the call."""


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Run a case now. If this version of the backend does not support its call, keep the error as `unsupported`."""
    if BACKEND == "nccl" and function.__name__ in NOT_WITH_NCCL:
        return function
    begin = time.monotonic_ns()
    result, unsupported = None, ""
    try:
        result = function()
    except (RuntimeError, ValueError) as error:
        unsupported = str(error)
        if not re.search("does not support|must be contiguous", unsupported):
            raise
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    code = function.__code__
    lines = [line for *_, line in code.co_lines() if line is not None]
    cases[function.__name__] = {
        "begin": begin, "end": time.monotonic_ns(), "lines": [min(lines), max(lines)], "tells": result,
        "unsupported": unsupported,
    }  # fmt: skip
    return function


@case
def all_reduce() -> None:
    dist.all_reduce(torch.ones(100))


@case
def all_reduce_asynchronous() -> None:
    dist.all_reduce(torch.ones(100), op=dist.ReduceOp.MAX, async_op=True).wait()


@case
def all_reduce_polled() -> None:
    work = dist.all_reduce(torch.ones(100), async_op=True)
    while not work.is_completed():
        time.sleep(0.001)


@case
def all_reduce_dropped() -> None:
    dist.all_reduce(torch.ones(7), async_op=True)
    dist.barrier()  # afterwards, no Python object owns the Work


@case
def all_reduce_kept() -> None:
    globals()["kept"] = dist.all_reduce(torch.ones(9), async_op=True)


@case
def all_reduce_coalesced() -> None:
    dist.all_reduce_coalesced([torch.ones(10), torch.ones(20)])


@case
def coalescing_manager() -> None:
    with _coalescing_manager():
        dist.all_reduce(torch.ones(10))
        dist.all_reduce(torch.ones(30))


@case
def all_gather() -> None:
    dist.all_gather([torch.zeros(50, dtype=torch.bfloat16) for _ in range(RANKS)], torch.ones(50, dtype=torch.bfloat16))


@case
def all_gather_into_tensor() -> None:
    dist.all_gather_into_tensor(torch.zeros(RANKS * 40), torch.ones(40))


@case
def all_gather_coalesced() -> None:
    with _coalescing_manager():
        dist.all_gather_into_tensor(torch.zeros(RANKS * 4), torch.ones(4))
        dist.all_gather_into_tensor(torch.zeros(RANKS * 6), torch.ones(6))


@case
def reduce_scatter() -> None:
    dist.reduce_scatter(torch.zeros(11), [torch.ones(11) for _ in range(RANKS)])


@case
def reduce_scatter_tensor() -> None:
    dist.reduce_scatter_tensor(torch.zeros(12), torch.ones(RANKS * 12), op=dist.ReduceOp.MIN)


@case
def all_to_all_single() -> None:
    dist.all_to_all_single(torch.zeros(RANKS, 5), torch.ones(RANKS, 5))


@case
def all_to_all_uneven() -> None:
    sent = [[1, 2, 3], [4, 0, 1], [2, 2, 2]]
    received = [row[RANK] for row in sent]
    dist.all_to_all_single(torch.zeros(sum(received), 5), torch.ones(sum(sent[RANK]), 5), received, sent[RANK])


@case
def all_to_all_empty() -> None:
    dist.all_to_all_single(torch.zeros(0, 5), torch.ones(0, 5), [0] * RANKS, [0] * RANKS)


@case
def broadcast() -> None:
    dist.broadcast(torch.ones(100, dtype=torch.bool), src=2)


@case
def reduce() -> None:
    dist.reduce(torch.ones(100, dtype=torch.float64), dst=1)


@case
def gather() -> None:
    dist.gather(torch.ones(10), [torch.zeros(10) for _ in range(RANKS)] if RANK == 1 else None, dst=1)


@case
def scatter() -> None:
    dist.scatter(torch.zeros(10), [torch.ones(10) for _ in range(RANKS)] if RANK == 2 else None, src=2)


@case
def send_and_recv() -> None:
    for _ in range(2):
        if RANK == 0:
            dist.send(torch.ones(8), 1, tag=5)
        elif RANK == 1:
            dist.recv(torch.zeros(8), 0, tag=5)


@case
def isend_and_irecv() -> None:
    if RANK == 1:
        dist.isend(torch.ones(8), 2).wait()
    elif RANK == 2:
        dist.irecv(torch.zeros(8), 1).wait()


@case
def batch_isend_irecv() -> None:
    operations = [
        dist.P2POp(dist.isend, torch.ones(16), (RANK + 1) % RANKS),
        dist.P2POp(dist.irecv, torch.zeros(16), (RANK - 1) % RANKS),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


@case
def recv_from_any() -> Any:
    if RANK == 2:
        return dist.recv(torch.zeros(4))
    if RANK == 0:
        dist.send(torch.ones(4), 2)
    return None


@case
def barrier() -> None:
    dist.barrier()


@case
def monitored_barrier() -> None:
    dist.monitored_barrier()


@case
def all_gather_object() -> list[Any]:
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, {"rank": RANK})
    return gathered


@case
def broadcast_object_list() -> None:
    dist.broadcast_object_list(["x" * 50 if RANK == 0 else None], src=0)


@case
def all_reduce_sparse() -> None:
    dist.all_reduce(torch.diag((torch.arange(10) <= RANK).float()).to_sparse())


@case
def empty() -> None:
    dist.all_reduce(torch.ones(0))


@case
def inference_mode() -> None:
    with torch.inference_mode():
        dist.all_reduce(torch.ones(10))


@case
def complex_numbers() -> None:
    dist.all_reduce(torch.ones(10, dtype=torch.complex64))


@case
def not_contiguous() -> None:
    dist.all_reduce(torch.ones(10, 4).t())


@case
def failing() -> str:
    try:
        dist.all_reduce(torch.ones(10), op=dist.ReduceOp.BAND)  # not for floating-point numbers
    except (RuntimeError, ValueError) as error:  # gloo's, NCCL's
        return str(error)
    return ""


@case
def failing_and_dropped() -> None:
    work = dist.all_reduce(torch.ones(10), op=dist.ReduceOp.BAND, async_op=True)
    while not work.get_future().done():
        time.sleep(0.001)
    time.sleep(0.2)  # a barrier also fails if gloo's threads still hold a failed work


@case
def message_dropped() -> None:
    if RANK < 2:
        work = dist.isend(torch.ones(9), 1) if RANK == 0 else dist.irecv(torch.zeros(9), 0)
        if RANK == 1:
            work.wait()
    dist.barrier()  # the message has arrived


@case
def message_kept() -> None:
    if RANK == 0:
        globals()["sent"] = dist.isend(torch.ones(9), 1)
    elif RANK == 1:
        dist.recv(torch.zeros(9), 0)
    dist.barrier()


@case
def reduce_scatter_dropped() -> None:
    dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(RANKS * 2), async_op=True)
    dist.barrier()


@case
def subgroup() -> None:
    pair = dist.new_group([1, 2], group_desc="a pair")
    if RANK:
        dist.broadcast(torch.ones(5), src=2, group=pair)
        if RANK == 1:
            dist.send(torch.ones(3), 2, group=pair)
        else:
            dist.recv(torch.ones(3), 1, group=pair)


@case
def functional() -> float:
    return float(funcol.all_reduce(torch.ones(10), "sum", dist.group.WORLD).sum())


@case
def functional_coalesced() -> float:
    first, second = funcol.all_reduce_coalesced([torch.ones(10), torch.ones(20)], "sum", dist.group.WORLD)
    return float(first.sum() + second.sum())


@case
def functional_dropped() -> None:
    torch.ops._c10d_functional.all_reduce(torch.ones(6), "sum", dist.group.WORLD.group_name)
    dist.barrier()


@case
def functional_of_a_view() -> float:
    total = torch.ops._c10d_functional.all_reduce(torch.ones(20), "sum", dist.group.WORLD.group_name)
    return float(torch.ops._c10d_functional.wait_tensor(total[5:]).sum())


@case
def redistribute() -> float:
    mesh = init_device_mesh(DEVICE, (RANKS,))
    shards = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])
    return float(shards.redistribute(mesh, [Replicate()]).to_local().sum())


def reduced(tensor: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = funcol.all_reduce(tensor * 2, "sum", dist.group.WORLD)
    return total + 1


@case
def compiled() -> list[float]:
    function = torch.compile(reduced, backend="aot_eager", fullgraph=True)
    return [float(function(torch.ones(25))[0]) for _ in range(2)]


def destroy_process_group() -> None:
    """Destroy the group after a pause: torch 2.6, holding the GIL, joins a thread that may need it to free a tensor."""
    time.sleep(0.3)
    dist.destroy_process_group()


@case
def world_again() -> None:
    destroy_process_group()
    os.environ["MASTER_PORT"] = os.environ["SECOND_PORT"]  # no rank may connect to the old store
    dist.init_process_group(BACKEND)  # under the name of the first one
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3))


dist.barrier()
(Path(sys.argv[1]) / f"rank{RANK}.json").write_text(json.dumps(cases))
destroy_process_group()
