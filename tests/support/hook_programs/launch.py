"""python launch.py RANKS PROGRAM [ARGUMENT ...]: the ranks of a program, forked after the imports that cost seconds.

With COMMTRACE in the environment this process has the hooks in place as any other would, and each rank, being the one
that communicates, records for itself.
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

MORE_PORTS = 5  # for programs with several process groups of the whole world, one after the other


def become(rank: int, world: dict[str, Any]) -> None:
    atexit.register(wait_for_threads)  # torch's own defect, as in `nursery`
    os.environ.update({name: str(value) for name, value in {**world, "RANK": rank, "LOCAL_RANK": rank}.items()})
    sys.argv = sys.argv[2:]


def wait(pids: list[int]) -> int:
    """Status of the first one that fails, after which the others would wait for ever; 0 for none."""
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
    """True in a rank."""
    if os.environ.get("LAUNCH_DEEPSPEED") == "1":
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  (all that its first optimizer imports)
    gc.freeze()  # ranks that look for garbage need not go through what they share
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
