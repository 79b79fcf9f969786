"""Makes some calls and ends in one of many ways: ending.py HOW."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np
from mpi4py import MPI

HOW = sys.argv[1]
if not MPI.Is_initialized():  # with MPI4PY_RC_INITIALIZE=0
    MPI.Init_thread()
WORLD = MPI.COMM_WORLD


def calls(count: int) -> None:
    into: Any = np.zeros(1)
    for _ in range(count):
        WORLD.Allreduce(np.ones(1), into)
    assert into[0] == WORLD.Get_size()


def spawn() -> None:
    """Spawn a child, which runs this program, too."""
    parent = MPI.Comm.Get_parent()
    if parent == MPI.COMM_NULL:
        child = MPI.COMM_SELF.Spawn(sys.executable, [__file__, HOW], maxprocs=1) if WORLD.Get_rank() == 0 else None
        if child is not None:
            child.send("to the child", 0)
            assert child.recv() == "to the parent"
            child.Disconnect()
    else:
        assert parent.recv() == "to the child"
        parent.send("to the parent", 0)
        parent.Disconnect()


def with_torch() -> None:
    """Use torch.distributed, too; the ranks exchange its address by MPI."""
    import torch
    import torch.distributed as dist

    store = WORLD.bcast(sys.argv[2], root=0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=WORLD.Get_rank(), world_size=WORLD.Get_size())
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy())
    given = torch.ones(3, dtype=torch.int32)
    WORLD.Bcast(given, 0)
    dist.destroy_process_group()


def again() -> None:
    """Stop tracing and start it again, with calls in between."""
    import commtrace

    original = MPI.Comm.__dict__["Allreduce"]
    commtrace.stop()
    calls(3)
    assert MPI.Comm.__dict__["Allreduce"] is not original
    commtrace.start(sys.argv[2])
    calls(2)
    commtrace.stop()


def fork() -> None:
    """Fork a child that does not communicate; it must not change the parent's log."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    calls(1)


def kill() -> None:
    sys.stdout.flush()
    WORLD.Barrier()
    os.kill(os.getpid(), signal.SIGKILL)


ENDS = {
    "well": lambda: None,
    "initialized late": lambda: MPI.Finalize(),
    "finalized": lambda: MPI.Finalize(),
    "without cleaning up": lambda: os._exit(0),
    "aborted": lambda: WORLD.Abort(3),
    "killed": kill,
    "spawned": spawn,
    "with torch": with_torch,
    "again": again,
    "forked": fork,
}
calls(5)
ENDS[HOW]()
