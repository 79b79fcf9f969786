"""A rank of a random program on a host whose clock another test sets: collectives and messages over gloo.

Arguments: rank, seconds, seed. Each writes its clock, as the program sees it, and the machine's before and after, read
by a direct system call, past a preloaded library.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import time

import torch
import torch.distributed as dist

_CLOCK_GETTIME, _MONOTONIC = 228, 1  # on x86-64


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def kernel_monotonic_ns() -> int:
    """Return CLOCK_MONOTONIC of this time namespace, which a library that is preloaded does not change."""
    spec = _TimeSpec()
    ctypes.CDLL(None).syscall(_CLOCK_GETTIME, _MONOTONIC, ctypes.byref(spec))
    return int(spec.seconds) * 10**9 + int(spec.nanoseconds)


def main() -> None:
    """Run."""
    rank, seconds, seed = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    choices, pauses = random.Random(seed), random.Random(rank)
    tensor = torch.ones(256)
    pairs = []
    calls = round(seconds / 0.005)
    for number in range(calls):
        if number == calls // 2 and "CLOCK_STEP_MS" in os.environ:
            ctypes.CDLL(None).clock_jump()
        time.sleep(pauses.expovariate(1 / 0.004))
        operation = choices.randrange(4)
        if operation == 0:
            dist.all_reduce(tensor)
        elif operation == 1:
            dist.barrier()
        elif operation == 2:
            dist.broadcast(tensor, choices.randrange(2))
        else:
            sender = choices.randrange(2)
            (dist.send if sender == rank else dist.recv)(tensor, 1 - rank)
        before = kernel_monotonic_ns()
        own = time.monotonic_ns()
        pairs.append((own, before, kernel_monotonic_ns()))
    print(json.dumps(pairs), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
