"""python simulate.py SMALL WORLD MAIL PROGRAM [ARGUMENT ...]: run a program as every rank of a dry run at once.

SMALL: elements up to which tensors are computed; MAIL: an empty directory. A rank is a fork of this process, which has
imported torch.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

from commtrace.dryrun import untouched_memory as memory

small, world, mail, *program = sys.argv[1:]
memory.MAX_COMPUTED_ELEMENTS = int(small)  # type: ignore[misc]


def main() -> bool:
    """Run every rank to its end; return True in a rank."""
    running: dict[int, int] = {}
    for rank in range(int(world)):
        pid = os.fork()
        if pid == 0:
            return become(rank)
        running[pid] = rank
    while running:
        pid, status = os.wait()
        rank = running.pop(pid)
        if status:
            for other in running:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"rank {rank} ended with status {os.waitstatus_to_exitcode(status)}")
        Path(mail, f"done-{rank:05d}").touch()
    return False


def become(rank: int) -> bool:
    """Become the rank of this number, and return True."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=world, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=world)
    os.environ.update(COMMTRACE_SIMULATED=f"0:simulated:cpu:allow:{mail}")
    sys.argv = program
    import commtrace.hooks  # noqa: F401  (as commtrace.startup does before it starts a simulated rank)
    from commtrace.dryrun import simulation

    simulation.install()
    if "deepspeed" in sys.modules:
        from commtrace.dryrun import deepspeed_patches as deepspeed

        deepspeed.install()
    return True


if main():
    runpy.run_path(sys.argv[0], run_name="__main__")
