"""Bare messages from one rank to another: what makes the first one slow.

    COMMTRACE=log torchrun --standalone --nproc-per-node 2 -m examples.paper_study.timing.bare_messages

For each size, several times: a new process group with new connections, a first message, later messages, and later
messages into memory that has never been touched. Both ranks wait in a barrier of another group before each message.
A message's tag is its kind. With `TORCH_GLOO_LAZY_INIT=1`, gloo creates connections on first use.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Final

SIZES: Final = (4, 1024, 131_072, 262_144, 524_288, 1_048_576)
"""Bytes: a pipeline's handshake, its metadata, and activations of 128 to 1024 tokens of width 256 in fp32."""
TRIALS: Final = 6
LATER: Final = 3

FIRST, TOUCHED, UNTOUCHED = 0, 1, 2
TAGS: Final = {FIRST: "first on its connection", TOUCHED: "later", UNTOUCHED: "later, into untouched memory"}


def main(sizes: Sequence[int] = SIZES, trials: int = TRIALS) -> None:
    """Send all messages from rank 0 to rank 1, under torchrun."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for _ in range(trials):
        for size in sizes:
            group = dist.new_group([0, 1])
            used = torch.ones(size, dtype=torch.uint8)
            for tag in (FIRST, *[TOUCHED] * LATER, *[UNTOUCHED] * LATER):
                untouched = tag == UNTOUCHED and dist.get_rank() == 1
                buffer = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8) if untouched else used
                dist.barrier()
                if dist.get_rank() == 0:
                    dist.send(buffer, 1, group=group, tag=tag)
                elif dist.get_rank() == 1:
                    dist.recv(buffer, 0, group=group, tag=tag)
            dist.barrier()
            dist.destroy_process_group(group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
