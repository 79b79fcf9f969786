"""Transport over MPI with mpi4py's buffer methods (the upper-case ones, which do not pickle)."""

from __future__ import annotations

from typing import Any

import torch

from .transports import Transport, Wait


class MpiTransport(Transport):
    """A communicator of mpi4py. Without `staged`, tensors on a GPU need a CUDA-aware MPI."""

    def __init__(self, comm: Any, staged: bool = False) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size(), staged)
        self._comm = comm

    def blocks(self, size: int) -> Transport:
        """Implement Transport."""
        return MpiTransport(self._comm.Split(self.rank // size, self.rank), self.staged)

    def barrier(self) -> None:
        """Implement Transport."""
        self._comm.Barrier()

    def close(self) -> None:
        """Do nothing: the communicator is the caller's."""

    def _all_gather(self, whole: torch.Tensor, share: torch.Tensor) -> None:
        self._comm.Allgather(_buffer(share), _buffer(whole))

    def _reduce_scatter(self, share: torch.Tensor, parts: torch.Tensor) -> None:
        self._comm.Reduce_scatter_block(_buffer(parts), _buffer(share))

    def _all_to_all(self, received: torch.Tensor, parts: torch.Tensor) -> None:
        self._comm.Alltoall(_buffer(parts), _buffer(received))

    def _all_reduce(self, total: torch.Tensor, partial: torch.Tensor) -> None:
        self._comm.Allreduce(_buffer(partial), _buffer(total))

    def _exchange(self, incoming: torch.Tensor, outgoing: torch.Tensor, source: int, to: int) -> list[Wait]:
        requests = [self._comm.Irecv(_buffer(incoming), source), self._comm.Isend(_buffer(outgoing), to)]
        return [request.Wait for request in requests]

    def _send(self, outgoing: torch.Tensor, to: int) -> Wait:
        wait: Wait = self._comm.Isend(_buffer(outgoing), to).Wait
        return wait

    def _recv(self, incoming: torch.Tensor, source: int) -> None:
        self._comm.Recv(_buffer(incoming), source)


def _buffer(tensor: torch.Tensor) -> Any:
    """Return a tensor's buffer for mpi4py: a numpy view, or the tensor itself if it is on a GPU."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor
