"""python wire.py FOLDER: large messages, and the bytes that the kernel counts on the loopback interface meanwhile."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
RANK, RANKS = dist.get_rank(), dist.get_world_size()
SHARE = 1 << 18  # elements of 4 bytes
WHOLE = SHARE * RANKS


def sent_bytes() -> int:
    """Return the bytes that this network namespace has sent; nothing else runs in it."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise LookupError("no loopback interface")


def message() -> None:
    if RANK == 0:
        dist.send(torch.ones(WHOLE), 1)
    elif RANK == 1:
        dist.recv(torch.zeros(WHOLE), 0)


OPERATIONS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(WHOLE)),
    "all_gather": lambda: dist.all_gather_into_tensor(torch.zeros(WHOLE), torch.ones(SHARE)),
    "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.zeros(SHARE), torch.ones(WHOLE)),
    "broadcast": lambda: dist.broadcast(torch.ones(WHOLE), 0),
    "all_to_all": lambda: dist.all_to_all_single(torch.zeros(WHOLE), torch.ones(WHOLE)),
    "send": message,
}

results = {}
for name, operation in OPERATIONS.items():
    operation()  # establishes connections
    dist.barrier()
    time.sleep(0.1)
    begin, before = time.monotonic_ns(), sent_bytes()
    dist.barrier()
    for _ in range(4):
        operation()
    end = time.monotonic_ns()
    dist.barrier()
    time.sleep(0.1)
    results[name] = [begin, end, sent_bytes() - before]
    dist.barrier()
(Path(sys.argv[1]) / f"rank{RANK}.json").write_text(json.dumps(results))
dist.destroy_process_group()
