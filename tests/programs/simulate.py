"""python simulate.py SMALL WORLD MAIL PROGRAM [ARGUMENT ...]: a program as every rank of a dry run, one by one.

SMALL: elements up to which tensors are computed; MAIL: an empty folder in one that lies beside the logs. A rank is a
fork of this process, which has imported torch.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from commtrace.dryrun import memory
from commtrace.session import session

small, world, mail, *program = sys.argv[1:]
memory.SMALL = int(small)  # type: ignore[misc]


def main() -> bool:
    """Every rank until it is done; True in a rank."""
    from commtrace.dryrun.mail import WAITING

    waiting = [*range(int(world))]
    attempts = 0
    while waiting:
        rank, attempts = waiting.pop(0), attempts + 1
        assert attempts < 100, "ranks wait for each other"
        pid = os.fork()
        if pid == 0:
            return become(rank)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == WAITING:
            waiting.append(rank)
            for file in Path(mail).parents[1].glob(f"*/*/*/rank{rank:05d}-*"):
                file.unlink()
        elif status:
            sys.exit(status)
        else:
            Path(mail, f"done-{rank:05d}").touch()
    return False


def become(rank: int) -> bool:
    """The rank of that number."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=world, LOCAL_RANK=str(rank), COMMTRACE_SIMULATED=f"0:simulated:{mail}")
    sys.argv = program
    from commtrace.dryrun import simulation

    simulation.install()
    if "deepspeed" in sys.modules:
        from commtrace.dryrun import deepspeed

        deepspeed.install()
    return True


if main():
    assert session.settings is None
    runpy.run_path(sys.argv[0], run_name="__main__")
