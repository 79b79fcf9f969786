"""torch.distributed as a library to measure: gloo, nccl, and mpi where torch is built with it."""

# ruff: noqa: D102 (the methods are documented in BenchLibrary and BenchGroup)
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    from . import NetworkError

    raise NetworkError(f"torch cannot be imported ({error}); install it, or measure MPI by --through mpi4py") from error

from . import NetworkError
from .bench_library import BenchLibrary
from .bench_plan import BenchPlan
from .measuring import BenchGroup, Call
from .operations import PING_PONG, Values

# torch 2.13 renames these two, and warns about the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def connect(plan: BenchPlan) -> TorchBenchLibrary:
    """Join the process group that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR ...)."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not dist.is_available():
        raise NetworkError("this torch was built without torch.distributed")
    if plan.backend == "mpi" and not dist.is_mpi_available():
        raise NetworkError("this torch was built without MPI; measure MPI by --through mpi4py, or use --backend gloo")
    if plan.backend == "nccl":
        if not torch.cuda.is_available() or not dist.is_nccl_available():
            raise NetworkError("--backend nccl needs a torch with NCCL and a GPU for each rank; there is none")
        if local_rank >= torch.cuda.device_count():
            raise NetworkError(
                f"--backend nccl: local rank {local_rank} has no GPU of its own, there are {torch.cuda.device_count()}"
            )
    device = torch.device("cuda", local_rank) if plan.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            plan.backend, timeout=timedelta(seconds=plan.timeout_s), device_id=device if device.type == "cuda" else None
        )
    except (RuntimeError, ValueError) as error:
        raise NetworkError(
            f"the ranks did not find each other ({plan.backend}): {str(error).partition(chr(10))[0]}"
        ) from error
    return TorchBenchLibrary(device, local_rank, plan.backend)


class TorchBenchLibrary(BenchLibrary):
    """All ranks of a process group."""

    def __init__(self, device: torch.device, local_rank: int, backend: str) -> None:
        self.rank, self.size, self.local_rank = dist.get_rank(), dist.get_world_size(), local_rank
        self._device, self._backend = device, backend

    def group(self, ranks: Sequence[int]) -> BenchGroup | None:
        group = dist.new_group([*ranks])
        return TorchBenchGroup(group, self._device) if self.rank in ranks else None

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        dist.barrier()  # threads of gloo sleep meanwhile; ranks of NCCL have a device each

    def versions(self) -> Mapping[str, str]:
        nccl = {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if self._backend == "nccl" else {}
        return {"torch": str(torch.__version__), **nccl}

    def close(self) -> None:
        dist.barrier()
        dist.destroy_process_group()

    def abort(self) -> None:
        pass  # peers of a process that ends see their connections break


class TorchBenchGroup(BenchGroup):
    """A process group of torch."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def buffer(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.float32, device=self._device)

    def fill(self, buffer: torch.Tensor, values: Values) -> None:
        buffer.copy_(torch.from_numpy(values))

    def values(self, buffer: torch.Tensor) -> Values:
        values: Values = buffer.cpu().numpy()
        return values

    def settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def barrier(self) -> None:
        dist.barrier(self._group)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        own = torch.tensor(values, dtype=torch.float64, device=self._device)
        gathered = torch.empty(self.size * len(values), dtype=torch.float64, device=self._device)
        _all_gather(gathered, own, group=self._group)
        rows: list[list[float]] = gathered.view(self.size, -1).tolist()
        return rows

    def call(self, op: str, source: torch.Tensor, result: torch.Tensor, messages: int) -> Call:
        if op in ("gather", "scatter"):
            return self._rooted(op, source, result)
        if op.startswith("send_recv"):
            return self._ping_pong(source, result) if op == PING_PONG else self._window(source, result, messages)
        group = self._group
        calls: dict[str, Call] = {
            "all_reduce": lambda: dist.all_reduce(result, group=group),
            "all_gather": lambda: _all_gather(result, source, group=group),
            "reduce_scatter": lambda: _reduce_scatter(result, source, group=group),
            "broadcast": lambda: dist.broadcast(result, group=group, group_src=0),
            "reduce": lambda: dist.reduce(result, group=group, group_dst=0),
            "all_to_all": lambda: dist.all_to_all_single(result, source, group=group),
            "barrier": lambda: dist.barrier(group),
        }
        return calls[op]

    def _rooted(self, op: str, source: torch.Tensor, result: torch.Tensor) -> Call:
        """Return a gather or scatter; the lists of shares are made before the timing, as programs do."""
        group, is_root = self._group, self.rank == 0
        shares = [*(result if op == "gather" else source).chunk(self.size)] if is_root else None
        if op == "gather":
            return lambda: dist.gather(source, shares, group=group, group_dst=0)
        return lambda: dist.scatter(result, shares, group=group, group_src=0)

    def _ping_pong(self, source: torch.Tensor, result: torch.Tensor) -> Call:
        group, other = self._group, 1 - self.rank

        def first() -> None:
            dist.send(source, group=group, group_dst=other)
            dist.recv(result, group=group, group_src=other)

        def second() -> None:
            dist.recv(result, group=group, group_src=other)
            dist.send(source, group=group, group_dst=other)

        return second if self.rank else first

    def _window(self, source: torch.Tensor, result: torch.Tensor, messages: int) -> Call:
        group, answer = self._group, self.buffer(1)

        def sender() -> None:
            works = [dist.isend(source, group=group, group_dst=1) for _ in range(messages)]
            for work in works:
                work.wait()  # type: ignore[union-attr]  # this rank is in the group
            dist.recv(answer, group=group, group_src=1)

        def receiver() -> None:
            works = [dist.irecv(result, group=group, group_src=0) for _ in range(messages)]
            for work in works:
                work.wait()  # type: ignore[union-attr]  # this rank is in the group
            dist.send(answer, group=group, group_dst=0)

        return receiver if self.rank else sender
