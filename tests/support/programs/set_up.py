"""python set_up.py CASES...: for each case, two ranks that communicate over gloo, set up as the case says.

A case is JSON: `log`, and what to change: `variables`, `variables_of_rank_1`, `libraries` (files to load), `cores`,
`threads`, `cgroup` (folders to enter), `network` (a shell command in a network namespace of its own). The ranks are
forked from this process, because an import of torch takes seconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import commtrace

CLONE_NEWNET = 0x40000000


def main() -> None:
    """Run the cases one after the other."""
    for text in sys.argv[1:]:
        case = json.loads(text)
        in_child(lambda case=case: run(case))  # type: ignore[misc]


def in_child(function: Callable[[], None]) -> None:
    """Call a function in a forked process, and wait for its end."""
    _, status = os.waitpid(fork(function), 0)
    if status:
        sys.exit(1)


def fork(function: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        function()
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


def run(case: dict[str, Any]) -> None:
    """Run both ranks of a case."""
    if command := case.get("network"):
        if ctypes.CDLL(None).unshare(CLONE_NEWNET):
            raise OSError("unshare")
        subprocess.run(["sh", "-c", command], check=True)
    with tempfile.TemporaryDirectory() as folder:
        pids = [fork(lambda rank=rank: communicate(case, rank, folder)) for rank in range(2)]  # type: ignore[misc]
        if any(os.waitpid(pid, 0)[1] for pid in pids):
            raise RuntimeError("a rank failed")


def communicate(case: dict[str, Any], rank: int, folder: str) -> None:
    """Be one rank."""
    os.environ.update(case.get("variables", {}))
    if rank == 1:
        os.environ.update(case.get("variables_of_rank_1", {}))
    for path in case.get("libraries", ()):
        ctypes.CDLL(path)
    if "cores" in case:
        os.sched_setaffinity(0, case["cores"])
    for path in case.get("cgroup", ()):
        with open(os.path.join(path, "cgroup.procs"), "w") as file:
            file.write(str(os.getpid()))
    torch.set_num_threads(case.get("threads", 1))
    commtrace.start(case["log"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    data = torch.ones(8)
    for _ in range(3):
        dist.all_reduce(data)
    dist.barrier()
    commtrace.stop()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
