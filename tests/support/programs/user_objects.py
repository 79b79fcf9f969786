"""python user_objects.py: ranks exchange objects of 100 kB, and use what they get."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

LENGTH = 100_000


def main() -> None:
    """Gather objects in one rank and in all, and communicate as many elements as the objects have characters."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = {"rank": rank, "text": "x" * LENGTH}
    everywhere: list[Any] = [None] * ranks
    dist.all_gather_object(everywhere, own)
    dist.all_reduce(torch.ones(sum(len(each["text"]) for each in everywhere)))
    first: list[Any] | None = [None] * ranks if rank == 0 else None
    dist.gather_object(own, first)
    if first is not None:
        assert [len(each["text"]) for each in first] == [LENGTH] * ranks
    dist.barrier()
    dist.destroy_process_group()


main()
