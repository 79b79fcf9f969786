"""python stress.py ENDING: many threads and groups, Works that nobody waits for, and an unfriendly end.

One process of two that a launcher started; the ring is small, so that it runs full.
"""

from __future__ import annotations

import datetime
import os
import sys
import threading
from contextlib import suppress

import torch
import torch.distributed as dist

import commtrace

THREADS, GROUPS, CALLS = 8, 3, 120


def work(groups: list[dist.ProcessGroup], number: int) -> None:
    kept = []
    for i in range(CALLS):
        group = groups[i % GROUPS]
        handle = dist.all_reduce(torch.ones(1 + number), group=group, async_op=True)
        if i % 7 == 0:
            kept.append(handle)
        if i % 11 == 0 and handle is not None:
            handle.wait()
        if i % 13 == 0:
            with suppress(RuntimeError, ValueError):  # refused before anything is sent
                dist.all_gather([torch.ones(3)], torch.ones(2), group=group)
        if i % 17 == 0:
            dist.broadcast(torch.ones(4), 0, group=group)
    if number % 2:
        for handle in kept:
            handle.wait()


def run(groups: list[list[dist.ProcessGroup]]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, args=(groups[i], i)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    return threads


def main(ending: str) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    groups = [[dist.new_group([0, 1]) for _ in range(GROUPS)] for _ in range(THREADS)]
    threads = run(groups)
    if ending == "restart":
        directory = os.environ["STRESS_SECOND_LOG"]
        commtrace.stop()
        commtrace.start(directory)
    if ending == "fork":
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    for thread in threads:
        thread.join()
    dist.barrier()
    left = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(20)]
    if ending == "_exit":
        left[-1].wait()
        dist.barrier()
        os._exit(0)
    if ending == "in flight":
        del left
        dist.destroy_process_group()  # with work under way
        return
    for handle in left:
        handle.wait()
    dist.barrier()
    dist.destroy_process_group()


main(sys.argv[1])
