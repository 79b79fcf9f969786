"""python mixture.py FOLDER: every operator on two ranks, in different groups, call sites and phases."""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import commtrace


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


def finish(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def collectives() -> None:
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        dist.all_reduce(ones(10), op=op)
    works = [dist.all_reduce(ones(5), async_op=True) for _ in range(4)]
    for work in works[:2]:
        work.wait()
    dist.broadcast(torch.ones(3, dtype=torch.int64), 1)
    dist.reduce(ones(3), 1)
    dist.all_gather([ones(4), ones(4)], ones(4))
    dist.all_gather_into_tensor(ones(8), ones(4))
    dist.reduce_scatter_tensor(ones(4), ones(8))
    dist.reduce_scatter(ones(4), [ones(4), ones(4)])
    dist.barrier()
    dist.monitored_barrier()
    dist.all_reduce(torch.sparse_coo_tensor(torch.tensor([[0, 1]]), ones(2), (4,)))
    with contextlib.suppress(RuntimeError):
        dist.all_gather([ones(4)], ones(4))  # the list is too short


def all_to_all_and_rooted(rank: int) -> None:
    sizes = [([1, 2], [1, 3]), ([3, 1], [2, 1])][rank]
    dist.all_to_all_single(ones(8), ones(8))
    dist.all_to_all_single(ones(sum(sizes[0]), 2), ones(sum(sizes[1]), 2), sizes[0], sizes[1])
    shares = [ones(4), ones(4)] if rank == 0 else None
    dist.gather(ones(4), shares, dst=0)
    dist.scatter(ones(4), shares, src=0)


def messages(rank: int) -> None:
    other = 1 - rank
    if rank == 0:
        dist.send(ones(10), 1)
        dist.recv(ones(10), 1, tag=3)
        finish(dist.isend(ones(10), 1))
        dist.send(ones(10), 1)
    else:
        dist.recv(ones(10), 0)
        dist.send(ones(10), 0, tag=3)
        finish(dist.irecv(ones(10), 0))
        dist.recv(ones(10))
    both = [dist.P2POp(dist.isend, ones(10), other), dist.P2POp(dist.irecv, ones(10), other)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def objects(rank: int) -> None:
    dist.all_gather_object([None, None], {"rank": rank})
    dist.broadcast_object_list([rank], 0)


def groups(rank: int) -> None:
    for _ in range(2):  # the second group may get the first one's address
        group = dist.new_group([0, 1])
        dist.all_reduce(ones(3), group=group)
        dist.destroy_process_group(group)
    alone = [dist.new_group([member]) for member in range(2)]
    dist.all_reduce(ones(3), group=alone[rank])


def functional_and_compiled() -> None:
    world = dist.distributed_c10d._get_default_group()
    _ = functional.all_reduce(ones(10), "sum", world) + 1
    _ = functional.all_gather_tensor(ones(10), 0, world) + 1
    _ = [part + 1 for part in functional.all_reduce_coalesced([ones(10), ones(10)], "sum", world)]
    compiled = torch.compile(lambda x: functional.all_reduce(x, "sum", world) * 2, backend="aot_eager")
    for _ in range(2):
        compiled(ones(10))


def training() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 5))
    model = torch.nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        for _ in range(2):
            model(ones(3, 20)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with commtrace.phase("optimizer"):
        dist.all_reduce(ones(3))
    with torch.no_grad():
        model(ones(3, 20))
    dist.all_reduce(ones(3))


def main() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    collectives()
    all_to_all_and_rooted(rank)
    messages(rank)
    objects(rank)
    groups(rank)
    functional_and_compiled()
    training()
    dist.barrier()
    (Path(sys.argv[1]) / f"rank{rank}.json").write_text(json.dumps({}))
    dist.destroy_process_group()


main()
