"""python hand_made.py CASE: calls on process groups that are not registered in torch.distributed; prints results."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed  # its stubs are incomplete

LIMIT = timedelta(seconds=60)


def backend(store: Any, rank: int) -> Any:
    return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, 2, LIMIT)


def group_of(store: Any, rank: int) -> Any:
    group = dist.ProcessGroup(dist.PrefixStore("group", store), rank, 2)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend(store, rank))
    return group


def tcp_store() -> Any:
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, os.environ["RANK"] == "0", LIMIT)


def groups() -> None:
    rank = int(os.environ["RANK"])
    group, tensor = group_of(tcp_store(), rank), torch.ones(4)
    group.allreduce([tensor]).wait()
    group.broadcast(tensor, 1).wait()
    group.allgather([[torch.zeros(4), torch.zeros(4)]], [tensor]).wait()
    (group.send([tensor], 1, 7) if rank == 0 else group.recv([tensor], 0, 7)).wait()
    dist.all_reduce(tensor, group=group)
    group.barrier().wait()
    print(tensor.tolist())


def backend_object() -> None:
    rank = int(os.environ["RANK"])
    gloo, tensor = backend(tcp_store(), rank), torch.ones(4)
    gloo.allreduce([tensor]).wait()
    gloo.allreduce(tensor, dist.ReduceOp.MAX).wait()
    gloo.broadcast(tensor, 1).wait()
    options = dist.ReduceOptions()
    options.rootRank = 1
    gloo.reduce([tensor], options).wait()
    gloo.reduce(tensor, 0, dist.ReduceOp.SUM).wait()
    pair = [torch.zeros(4), torch.zeros(4)]
    gloo.allgather([pair], [tensor]).wait()
    gloo.allgather(pair, tensor).wait()
    gloo._allgather_base(torch.zeros(8), tensor).wait()
    gloo.gather([pair] if rank == 0 else [], [tensor], _gather_options()).wait()
    gloo.alltoall_base(torch.zeros(4), tensor, [], []).wait()
    (gloo.send([tensor], 1, 7) if rank == 0 else gloo.recv([tensor], 0, 7)).wait()
    dist.all_reduce(tensor, group=gloo)
    gloo.barrier().wait()
    print(tensor.tolist())


def _gather_options() -> Any:
    options = dist.GatherOptions()
    options.rootRank = 0
    return options


def threads() -> None:
    store, results = dist.HashStore(), [torch.ones(3), torch.ones(3)]
    made: list[Any] = []

    def run(rank: int) -> None:
        group = group_of(store, rank)
        made.append(group)
        for _ in range(2):
            group.allreduce([results[rank]]).wait()

    running = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    print([result.tolist() for result in results])


class InPython(dist.ProcessGroup):  # type: ignore[misc]
    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(tensors)
        create: Any = getattr(torch._C._distributed_c10d, "_create_work_from_future")  # noqa: B009  (not in the stubs)
        return create(future)


def python_class() -> None:
    for _ in range(2):
        InPython(0, 2).allreduce([torch.ones(3)]).wait()
    print("called")


def local_tensors() -> None:
    from torch.distributed._local_tensor import LocalTensorMode

    dist.init_process_group("fake", rank=0, world_size=2)
    for _ in range(2):
        with LocalTensorMode(2):
            dist.all_reduce(torch.ones(2))
    print("called")


def symmetric_memory() -> None:
    import torch.distributed._symmetric_memory as symm_mem

    dist.init_process_group("fake", rank=0, world_size=2)
    uses = (
        lambda: symm_mem.empty(3, device=torch.device("cpu")),
        lambda: symm_mem.rendezvous(torch.ones(3), dist.group.WORLD),
    )
    for use in uses:
        with contextlib.suppress(RuntimeError):  # torch has none on a CPU
            use()
    print("called")


def wrong_arguments() -> None:
    gloo = backend(tcp_store(), int(os.environ["RANK"]))
    for _ in range(3):
        try:
            gloo.allreduce("no tensor")
        except TypeError as error:
            print("refused", error.__context__)
    gloo.allreduce([torch.ones(4)]).wait()
    print("called")


CASES = (groups, backend_object, threads, python_class, local_tensors, symmetric_memory, wrong_arguments)
{case.__name__: case for case in CASES}[sys.argv[1]]()
