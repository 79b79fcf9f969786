"""Transport over torch.distributed: NCCL, which avoids copies through host memory, or gloo."""

from __future__ import annotations

import functools
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from .transports import Transport, Wait


class TorchTransport(Transport):
    """A process group of torch.distributed; None: the group of all ranks."""

    def __init__(self, group: dist.ProcessGroup | None, staged: bool = False) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), staged)
        self._group = group

    def blocks(self, size: int) -> Transport:
        """Implement Transport."""
        group, _ = dist.new_subgroups(size)
        return TorchTransport(group, self.staged)

    def barrier(self) -> None:
        """Implement Transport."""
        dist.barrier(self._group)

    def close(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group(self._group)

    # gloo requires equal dimensions on both sides; contiguous tensors are flattened without a copy.
    def _all_gather(self, whole: torch.Tensor, share: torch.Tensor) -> None:
        dist.all_gather_into_tensor(whole.flatten(0, 1), share, group=self._group)

    def _reduce_scatter(self, share: torch.Tensor, parts: torch.Tensor) -> None:
        dist.reduce_scatter_tensor(share, parts.flatten(0, 1), group=self._group)

    def _all_to_all(self, received: torch.Tensor, parts: torch.Tensor) -> None:
        dist.all_to_all_single(received, parts, group=self._group)

    def _all_reduce(self, total: torch.Tensor, partial: torch.Tensor) -> None:
        total.copy_(partial)
        dist.all_reduce(total, group=self._group)

    def _exchange(self, incoming: torch.Tensor, outgoing: torch.Tensor, source: int, to: int) -> list[Wait]:
        operations = [
            dist.P2POp(dist.irecv, incoming, group=self._group, group_peer=source),
            dist.P2POp(dist.isend, outgoing, group=self._group, group_peer=to),
        ]
        return [work.wait for work in dist.batch_isend_irecv(operations)]

    def _send(self, outgoing: torch.Tensor, to: int) -> Wait:
        work = dist.isend(outgoing, group=self._group, group_dst=to)
        assert work is not None, "this rank is in the group"
        return functools.partial(_finish, work, outgoing)

    def _recv(self, incoming: torch.Tensor, source: int) -> None:
        dist.recv(incoming, group=self._group, group_src=source)


def _finish(work: dist.Work, kept: torch.Tensor) -> None:
    """Wait until a message is sent; its tensor must be kept until then."""
    work.wait()


def init_process_group(comm: Any, backend: str) -> None:
    """Initialize torch.distributed among the ranks of an MPI communicator, with a store on a free port of rank 0."""
    rank, size = comm.Get_rank(), comm.Get_size()
    if rank == 0:
        store = TCPStore(socket.gethostname(), 0, size, is_master=True, wait_for_workers=False)
        comm.bcast((store.host, store.port))
    else:
        host, port = comm.bcast(None)
        store = TCPStore(host, port, size, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
