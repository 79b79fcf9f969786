"""python launch.py RANKS PROGRAM [ARGUMENT ...]: fork the ranks of a program after imports that take seconds.

With COMMTRACE in the environment, this process installs the hooks as any other would. Each rank has its own recorder,
because recording starts with the first communication call. With ONE_GPU=1, the ranks may share a GPU: NCCL refuses two
ranks of a host on one, so each is a host of its own to it, and they exchange data through sockets.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed  # noqa: F401

from commtrace.network.process_exit import wait_for_threads

sys.path.append(str(Path(__file__).parents[1]))
from ports import free_port

MORE_PORTS = 5  # for programs that initialize the default process group several times


def become(rank: int, world: dict[str, Any]) -> None:
    atexit.register(wait_for_threads)  # works around a defect of torch, see `nursery`
    os.environ.update({name: str(value) for name, value in {**world, "RANK": rank, "LOCAL_RANK": rank}.items()})
    if os.environ.get("ONE_GPU") == "1":
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", LOCAL_RANK="0")
    sys.argv = sys.argv[2:]


def wait(pids: list[int]) -> int:
    """Return the status of the first rank that fails, and kill the others, which would never end; 0 if none fails."""
    left = set(pids)
    while left:
        pid, status = os.wait()
        left.discard(pid)
        if status:
            for other in left:
                os.kill(other, signal.SIGKILL)
            return abs(os.waitstatus_to_exitcode(status))
    return 0


def main() -> bool:
    """Fork the ranks and wait for them. Return True in a rank."""
    if os.environ.get("LAUNCH_DEEPSPEED") == "1":
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  (with everything that its first optimizer imports)
    gc.freeze()  # garbage collection in ranks skips the objects that they share
    ranks, pids = int(sys.argv[1]), []
    world: dict[str, Any] = {
        "WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "SECOND_PORT": free_port(),
    }
    world["MORE_PORTS"] = " ".join(str(free_port()) for _ in range(MORE_PORTS))
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            become(rank, world)
            return True
        pids.append(pid)
    os._exit(wait(pids))


if __name__ == "__main__" and main():
    runpy.run_path(sys.argv[0], run_name="__main__")
