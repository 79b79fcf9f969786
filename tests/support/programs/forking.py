"""Forks in every way that training programs do, and communicates in between."""

from __future__ import annotations

import gc
import multiprocessing
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader


class Numbers(torch.utils.data.Dataset[int]):
    """Eight numbers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index >= 8:
            raise IndexError
        return index


def alone() -> None:
    """Communicate in a world of one rank."""
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    for _ in range(7):
        dist.all_reduce(torch.ones(2))
    print("child", flush=True)


def main() -> None:
    """Make calls, and create a different kind of child after each few."""
    dist.init_process_group("gloo")
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    works: list[Any] = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
    pid = os.fork()
    if pid == 0:
        works.clear()  # the child drops operations that the parent has in flight
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    for work in works:
        work.wait()
    print(sorted(int(number) for batch in DataLoader(Numbers(), num_workers=2, batch_size=2) for number in batch))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    child = multiprocessing.get_context("fork").Process(target=alone)
    child.start()
    child.join()
    print(tensor.tolist(), child.exitcode, flush=True)


main()
