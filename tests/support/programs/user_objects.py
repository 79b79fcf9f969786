"""python user_objects.py: ranks exchange objects of 100 kB, and use what they get."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

LENGTH = 100_000


def main() -> None:
    """Exchange objects in all ways, and communicate as many elements as the objects have characters."""
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
    sent: list[Any] = [{"text": "y" * (LENGTH + number)} if rank == 0 else None for number in range(ranks)]
    one: list[Any] = [None]
    dist.scatter_object_list(one, sent)
    dist.broadcast_object_list(sent)
    assert len(one[0]["text"]) == LENGTH + rank
    dist.all_reduce(torch.ones(len(sent[-1]["text"])))
    dist.barrier()
    dist.destroy_process_group()


main()
