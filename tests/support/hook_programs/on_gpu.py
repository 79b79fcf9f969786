"""python on_gpu.py FOLDER CASE ...: NCCL with one rank on the first GPU; writes what it saw to FOLDER/told.json.

One rank sends no bytes, but NCCL copies or reduces on the device, in the same streams as for many ranks.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.distributed.distributed_c10d import _coalescing_manager

import commtrace

dist: Any = torch.distributed  # its stubs are incomplete
GPU = torch.device("cuda", 0)
MIB = 1 << 20


def setup() -> None:
    torch.cuda.set_device(GPU)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=GPU)
    gather(MIB)
    gather(MIB, asynchronous=True).wait()
    torch.cuda.synchronize()


def gather(nbytes: int, asynchronous: bool = False) -> Any:
    shard = torch.ones(nbytes // 4, device=GPU)
    return dist.all_gather_into_tensor(torch.empty_like(shard), shard, async_op=asynchronous)


def keep_busy(ms: int) -> None:
    """Give the device work for `ms`, so that it runs behind the host."""
    torch.cuda._sleep(ms * 2_000_000)


def communication(work: Callable[[], None]) -> list[int]:
    """Return the ns of each NCCL kernel or copy on the device, in order, as profiled."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        work()
        torch.cuda.synchronize()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    intervals = sorted(
        (event.start_ns(), event.duration_ns())
        for event in events
        # NCCL's kernels and copies; not torch's annotations, which begin with "nccl:".
        if event.device_type() == torch._C._autograd.DeviceType.CUDA and re.match("ncclDev|Memcpy", event.name())
    )
    return [duration for _, duration in intervals]


def profiled(work: Callable[[], None]) -> dict[str, Any]:
    """Do the work behind a busy device, and return what was profiled, and when."""

    def behind() -> None:
        keep_busy(50)
        work()

    begin = time.monotonic_ns()
    return {"durations": communication(behind), "begin": begin, "end": time.monotonic_ns()}


def durations() -> dict[str, Any]:
    """Time 20 gathers of 1 GiB each in the caller's stream, in which nothing else copies."""
    shard = torch.ones(256 * MIB, device=GPU)
    out = torch.empty_like(shard)

    def work() -> None:
        for _ in range(20):
            dist.all_gather_into_tensor(out, shard)

    return profiled(work)


def waited() -> dict[str, Any]:
    """Time 20 gathers on the backend's stream, each waited for at once by a stream without other work."""
    shard = torch.ones(256 * MIB, device=GPU)
    out = torch.empty_like(shard)

    def work() -> None:
        for _ in range(20):
            dist.all_gather_into_tensor(out, shard, async_op=True).wait()

    return profiled(work)


def graph() -> dict[str, Any]:
    """Capture a graph while the events of earlier calls are still to be queried, and replay it."""
    shard, out = torch.ones(MIB, device=GPU), torch.empty(MIB, device=GPU)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        dist.all_gather_into_tensor(out, shard)
    keep_busy(300)  # longer than the drain thread sleeps, so that it queries these during the capture
    for _ in range(50):
        gather(MIB)
    captured = torch.cuda.CUDAGraph()
    begin = time.monotonic_ns()
    with torch.cuda.graph(captured, stream=side):
        doubled = shard * 2
        dist.all_gather_into_tensor(out, doubled)
        work = dist.all_gather_into_tensor(out, doubled, async_op=True)
        work.wait()
        time.sleep(0.3)  # several rounds of the drain thread
    end = time.monotonic_ns()
    results = []
    for value in (1.0, 3.0):
        shard.fill_(value)
        captured.replay()
        torch.cuda.synchronize()
        results.append(out.unique().tolist())
    return {"begin": begin, "end": end, "results": results}


def groups() -> dict[str, Any]:
    """Time gathers of 1 GiB on the world and on two more groups of the one rank, in turn, asynchronous and not."""
    shard = torch.ones(256 * MIB, device=GPU)
    outs = [torch.empty_like(shard) for _ in range(2)]
    pgs = [dist.group.WORLD, *(dist.new_group([0], group_desc=f"group {number}") for number in range(2))]
    for pg in pgs:
        dist.all_gather_into_tensor(outs[0], shard, group=pg)
    torch.cuda.synchronize()

    def work() -> None:
        for pg in pgs:
            dist.all_gather_into_tensor(outs[0], shard, group=pg)
            dist.all_gather_into_tensor(outs[0], shard, group=pg, async_op=True).wait()

    return profiled(work)


def coalesced() -> dict[str, Any]:
    """Time batches of two gathers of 1 GiB, asynchronous and not."""
    shard = torch.ones(256 * MIB, device=GPU)
    outs = [torch.empty_like(shard) for _ in range(2)]

    def batch(asynchronous: bool) -> None:
        with _coalescing_manager(device=GPU, async_ops=asynchronous) as manager:
            for out in outs:
                dist.all_gather_into_tensor(out, shard)
        if asynchronous:
            manager.wait()

    batch(False)
    torch.cuda.synchronize()

    def work() -> None:
        batch(False)
        batch(True)

    return profiled(work)


def overlap() -> dict[str, Any]:
    """Return the seconds of steps with overlapping gathers and matrix products, alternately traced and untraced."""
    matrix = torch.randn(4096, 4096, device=GPU)
    shard = torch.ones(64 * MIB, device=GPU)
    out = torch.empty_like(shard)

    def step() -> None:
        works = []
        for _ in range(8):
            works.append(dist.all_gather_into_tensor(out, shard, async_op=True))
            torch.mm(matrix, matrix)
        for work in works:
            work.wait()

    def seconds() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(10):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / 10

    times: dict[str, list[float]] = {"traced": [], "untraced": []}
    for turn in range(20):
        commtrace.start(Path(sys.argv[1]) / f"log{turn}")
        seconds()
        times["traced"].append(seconds())
        commtrace.stop()
        seconds()
        times["untraced"].append(seconds())
    return {name: statistics.median(values) for name, values in times.items()}


CASES = {
    "durations": durations, "waited": waited, "groups": groups, "coalesced": coalesced, "graph": graph,
    "overlap": overlap,
}  # fmt: skip

setup()
told = {name: CASES[name]() for name in sys.argv[2:]}
(Path(sys.argv[1]) / "told.json").write_text(json.dumps(told))
dist.destroy_process_group()
