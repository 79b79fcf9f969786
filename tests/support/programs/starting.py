"""Starts and stops recording several times: starting.py LOG."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import commtrace


def kernels(names: list[str]) -> list[str]:
    """Return the names of operators."""
    return [name for name in names if "::" in name]


def hooked() -> list[str]:
    """Return operators of torch.distributed with a kernel where commtrace's are, and methods that are not torch's."""
    names = [str(name) for name in torch._C._dispatch_get_all_op_names() if str(name).startswith("c10d::")]
    kernels = [name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, "BackendSelect")]
    wrapped = [name for name, value in vars(dist.Work).items() if hasattr(value, "__wrapped__")]
    return kernels + wrapped


def communicate(calls: int) -> None:
    """Make some calls; poll the first and wait for the others."""
    for number in range(calls):
        work = dist.all_reduce(torch.ones(4), async_op=True)
        work.wait() if number else work.is_completed()


commtrace.stop()  # started by the process from which this one was forked
WAIT = vars(dist.Work)["wait"]
own = hooked()
assert "wait" not in own, own
assert kernels(own), own  # they stay after a stop, and only forward calls
dist.init_process_group("gloo")
communicate(5)
for calls in (2, 3, 4):
    commtrace.start(sys.argv[1])
    assert len(kernels(hooked())) >= 20
    assert vars(dist.Work)["wait"] is not WAIT
    communicate(calls)
    with commtrace.phase("forward"):
        commtrace.stop()
    assert hooked() == own, hooked()
    assert vars(dist.Work)["wait"] is WAIT
    communicate(5)
