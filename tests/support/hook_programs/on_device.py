"""python on_device.py FOLDER BUILD: calls on a simulated device with known times (one process)."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.utils.cpp_extension import load

dist: Any = torch.distributed  # its stubs are incomplete

SOURCE = Path(__file__).with_name("simulated_device.cpp")
DEVICE = torch.device("privateuseone", 0)
MS = 1_000_000

device: Any = load("simulated_device", [str(SOURCE)], build_directory=sys.argv[2], extra_cflags=["-O0"])
dist.Backend.register_backend(
    "simulated", lambda store, rank, size, timeout: device.create(rank, size), devices=["privateuseone"]
)
cases: dict[str, dict[str, Any]] = {}


def case(function: Callable[[], Any]) -> None:
    """Run a case on a device that begins when the host has submitted everything, and wait until it is done."""
    before, first = device.counts(), device.launched()
    begin = time.monotonic_ns()
    device.hold()
    result = function()
    end = time.monotonic_ns()
    device.release()
    device.join()
    counts = {name: number - before[name] for name, number in device.counts().items()}
    cases[function.__name__] = {"begin": begin, "end": end, "tells": result, "first": first, "counts": counts}


def reduce(ms: int, asynchronous: bool = False) -> Any:
    device.next_kernel(ms * MS)
    return dist.all_reduce(device.make(4), async_op=asynchronous)


def compute(ms: int) -> None:
    device.compute(ms * MS)


dist.init_process_group("simulated", store=dist.HashStore(), rank=0, world_size=2)

# On an idle device: these calls find empty streams, which determines the offset of its clock.
cases["idle"] = {"begin": time.monotonic_ns(), "first": 0}
for _ in range(20):
    reduce(1)
    device.join()
cases["idle"]["end"] = time.monotonic_ns()


@case
def synchronous() -> None:
    compute(1)
    reduce(3)
    compute(2)
    reduce(7)


@case
def waiting_for_the_other_stream() -> None:
    """The kernel of 8 ms is in the other stream's way for 5: NCCL runs a group's calls one after the other."""
    reduce(5)
    device.stream(7)
    reduce(8)
    device.stream(0)


@case
def on_two_streams() -> None:
    compute(4)
    reduce(2)
    device.stream(7)
    reduce(5)
    device.stream(0)


@case
def waited_for() -> None:
    """The stream has less work than the collective takes."""
    work = reduce(8, asynchronous=True)
    compute(2)
    work.wait()
    work.wait()


@case
def hidden() -> None:
    """The stream has more work than the collective takes."""
    work = reduce(2, asynchronous=True)
    compute(9)
    work.wait()


@case
def one_after_the_other() -> None:
    """The backend begins the second call when the first one is done."""
    works = [reduce(8, asynchronous=True), reduce(3, asynchronous=True)]
    compute(2)
    for work in works:
        work.wait()


@case
def given_up() -> Any:
    """A tensor that the program releases is freed long before the device reaches its call."""
    before = device.counts()["allocated"]
    tensor = device.make(4)
    device.next_kernel(6 * MS)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    del tensor, work
    reduce(1)
    return device.counts()["allocated"] - before


@case
def never_waited_for() -> None:
    reduce(2, asynchronous=True)


@case
def future_only() -> bool:
    work = reduce(2, asynchronous=True)
    return bool(work.get_future().done())


@case
def functional() -> None:
    device.next_kernel(4 * MS)
    reduced = torch.ops._c10d_functional.all_reduce_(device.make(4), "sum", dist.group.WORLD.group_name)
    compute(1)
    torch.ops._c10d_functional.wait_tensor(reduced)


@case
def batch() -> None:
    device.next_kernel(5 * MS)
    with _coalescing_manager(device=DEVICE):
        dist.broadcast(device.make(4), 0)
        dist.broadcast(device.make(5), 0)


@case
def batch_with_a_work() -> None:
    device.next_kernel(6 * MS)
    with _coalescing_manager(device=DEVICE, async_ops=True) as manager:
        dist.broadcast(device.make(4), 0, async_op=True)
        dist.broadcast(device.make(5), 0, async_op=True)
    compute(1)
    manager.wait()


@case
def captured() -> None:
    device.capture(True)
    reduce(1)
    reduce(1, asynchronous=True).wait()
    with _coalescing_manager(device=DEVICE):
        dist.broadcast(device.make(4), 0)
    device.capture(False)


@case
def waited_for_under_capture() -> None:
    work = reduce(1, asynchronous=True)
    device.capture(True)
    work.wait()
    device.capture(False)


@case
def wait_that_raises() -> str:
    work = reduce(1, asynchronous=True)
    device.waits_fail(True)
    try:
        work.wait()
    except RuntimeError as error:
        return str(error)
    finally:
        device.waits_fail(False)
    return ""


@case
def too_many() -> None:
    for _ in range(4200):
        reduce(0)


# Only the drain thread returns events, so repeat until a call gets two of them again.
timed = "COMMTRACE_DEVICE_TIMES" in os.environ
deadline, taken = time.monotonic() + 60 * timed, 0
while taken < 2 and time.monotonic() < deadline:
    records = device.counts()["records"]
    reduce(0)
    device.join()
    taken = device.counts()["records"] - records


@case
def afterwards() -> None:
    reduce(3)


# The group is destroyed while the device still has to run its calls.
begin = time.monotonic_ns()
first = device.launched()
device.hold()
reduce(5)
dist.destroy_process_group()
cases["group_is_gone"] = {"begin": begin, "end": time.monotonic_ns(), "first": first}
device.release()
device.join()

if "breaks" in sys.argv:
    dist.init_process_group("simulated", store=dist.HashStore(), rank=0, world_size=2)
    pending = reduce(1, asynchronous=True)
    device.breaks()
    begin = time.monotonic_ns()
    reduce(1)
    reduce(1)
    pending.wait()
    cases["broken"] = {"begin": begin, "end": time.monotonic_ns(), "counts": device.counts()}
    dist.destroy_process_group()

totals = {"counts": device.counts(), "truth": device.truth()}
(Path(sys.argv[1]) / "told.json").write_text(json.dumps({"cases": cases, **totals}))
