"""Small Kineto traces, built event by event as torch.profiler writes them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

HOST, THREAD, STREAM = 100, 1, 7
BASE_NS = 1_700_000_000_000_000_000
ALL_REDUCE_KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND_RECV_KERNEL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


class KinetoFactory:
    """The events of one rank. Times are us; a kernel belongs to a call by its correlation."""

    def __init__(self, rank: int | None = 0, world_size: int = 2, groups: list[dict[str, Any]] | None = None) -> None:
        self.events: list[dict[str, Any]] = []
        self.members: dict[str, Any] = {"schemaVersion": 1}
        if rank is not None:
            config = groups or [{"pg_name": "0", "pg_desc": "default_pg", "ranks": [*range(world_size)]}]
            self.members["distributedInfo"] = {"rank": rank, "world_size": world_size, "pg_config": config}
        self._correlation = 0

    def event(self, cat: str, name: str, ts: float, dur: float, tid: int = THREAD, **args: Any) -> KinetoFactory:
        """Append an event."""
        pid = HOST if tid < 1000 else 0
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )
        return self

    def step(self, number: int, ts: float, dur: float) -> KinetoFactory:
        """Append the annotation of a step."""
        return self.event("user_annotation", f"ProfilerStep#{number}", ts, dur)

    def call(
        self, ts: float, dur: float = 50, operator: str = "allreduce_", kernels: tuple[tuple[float, float], ...] = (),
        kernel: str = ALL_REDUCE_KERNEL, tid: int = THREAD, concrete: list[str] | None = None, **comms: Any,
    ) -> KinetoFactory:  # fmt: skip
        """Append an operator, its `record_param_comms`, and launches and kernels, given by begin and duration."""
        args = {"Concrete Inputs": concrete} if concrete is not None else {}
        self.event("cpu_op", f"c10d::{operator}", ts, dur, tid, **args)
        stated = {
            "Collective name": "allreduce", "dtype": "Float", "In msg nelems": 1000, "Out msg nelems": 1000,
            "Group size": 2, "Process Group Name": "0", "Process Group Ranks": "[0, 1]",
        }  # fmt: skip
        self.event("cpu_op", "record_param_comms", ts + 1, dur - 2, tid, **{**stated, **comms})
        for begin, duration in kernels:
            self.kernel(begin, duration, kernel, launched=ts + 2, tid=tid)
        return self

    def kernel(
        self, ts: float, dur: float, name: str = ALL_REDUCE_KERNEL, launched: float | None = None, tid: int = THREAD,
        launcher: str = "cudaLaunchKernel", stream: int = STREAM,
    ) -> KinetoFactory:  # fmt: skip
        """Append a kernel, and its launch if it has one."""
        self._correlation += 1
        if launched is not None:
            self.event("cuda_runtime", launcher, launched, 1, tid, correlation=self._correlation)
        return self.event("kernel", name, ts, dur, 1000 + stream, stream=stream, correlation=self._correlation)

    def text(self) -> str:
        """Return the file's content, with members before and after the events, as Kineto writes it."""
        before = json.dumps(self.members)[:-1]
        events = ",\n  ".join(json.dumps(event) for event in self.events)
        return f'{before}, "traceEvents": [\n  {events}\n],\n "traceName": "x", "baseTimeNanoseconds": {BASE_NS}\n}}'

    def write(self, path: Path) -> Path:
        """Write the file, compressed if it is named so."""
        data = self.text().encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path
