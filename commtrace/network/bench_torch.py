"""torch.distributed as a library to measure: gloo, nccl, and mpi if torch is built with it."""

# ruff: noqa: D102 (the methods are documented in BenchLibrary and BenchGroup)
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from . import NetworkError
from .bench_operations import POINT_TO_POINT, Values
from .bench_plan import BenchPlan
from .measuring import BenchGroup, BenchLibrary, Call, message_call

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise NetworkError(f"torch cannot be imported ({error}); install it, or use --through mpi4py") from error

# torch 2.13 renames these two, and warns about the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchBenchLibrary(BenchLibrary):
    """All ranks of the process group that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR ...)."""

    def __init__(self, plan: BenchPlan) -> None:
        self._backend, self.local_rank = plan.backend, int(os.environ.get("LOCAL_RANK", "0"))
        if not dist.is_available():
            raise NetworkError("this torch was built without torch.distributed")
        if plan.backend == "mpi" and not dist.is_mpi_available():
            raise NetworkError(
                "this torch was built without MPI; measure MPI with --through mpi4py, or use --backend gloo"
            )
        self._device = torch.device("cpu")
        if plan.backend == "nccl":
            if not torch.cuda.is_available() or not dist.is_nccl_available():
                raise NetworkError("--backend nccl needs a torch with NCCL and a GPU for each rank; there is none")
            gpus = torch.cuda.device_count()
            if self.local_rank >= gpus:
                raise NetworkError(
                    f"--backend nccl: no GPU for local rank {self.local_rank}; GPUs on this host: {gpus}"
                )
            self._device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(self._device)
        timeout, gpu = timedelta(seconds=plan.timeout), self._device if plan.backend == "nccl" else None
        try:
            dist.init_process_group(plan.backend, timeout=timeout, device_id=gpu)
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise NetworkError(f"the ranks could not connect ({plan.backend}): {reason}") from error
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def group(self, ranks: Sequence[int]) -> BenchGroup | None:
        group = dist.new_group([*ranks])
        return TorchBenchGroup(group, self._device) if self.rank in ranks else None

    def wait(self) -> None:
        dist.barrier()  # gloo's threads sleep meanwhile; each NCCL rank has its own device

    def versions(self) -> Mapping[str, str]:
        nccl = {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if self._backend == "nccl" else {}
        return {"torch": str(torch.__version__), **nccl}

    def close(self) -> None:
        dist.barrier()
        dist.destroy_process_group()


class TorchBenchGroup(BenchGroup):
    """A process group of torch.distributed."""

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

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def call(self, op: str, source: torch.Tensor, result: torch.Tensor, messages: int) -> Call:
        group, is_root, peer = self._group, self.rank == 0, 1 - self.rank
        if op in POINT_TO_POINT:
            to_peer, from_peer = {"group": group, "group_dst": peer}, {"group": group, "group_src": peer}
            return message_call(
                op, self.rank, source, result, self.buffer(1), messages,
                send=partial(dist.send, **to_peer), recv=partial(dist.recv, **from_peer),
                isend=partial(dist.isend, **to_peer), irecv=partial(dist.irecv, **from_peer),
                wait_all=lambda works: [work.wait() for work in works],
            )  # fmt: skip
        # The lists of shares are made before timing, as in real programs.
        gathered, scattered = ([*buffer.chunk(self.size)] if is_root else None for buffer in (result, source))
        calls: dict[str, Call] = {
            "all_reduce": lambda: dist.all_reduce(result, group=group),
            "all_gather": lambda: _all_gather(result, source, group=group),
            "reduce_scatter": lambda: _reduce_scatter(result, source, group=group),
            "broadcast": lambda: dist.broadcast(result, group=group, group_src=0),
            "reduce": lambda: dist.reduce(result, group=group, group_dst=0),
            "all_to_all": lambda: dist.all_to_all_single(result, source, group=group),
            "gather": lambda: dist.gather(source, gathered, group=group, group_dst=0),
            "scatter": lambda: dist.scatter(result, scattered, group=group, group_src=0),
            "barrier": lambda: dist.barrier(group),
        }
        return calls[op]
