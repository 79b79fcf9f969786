"""Interface that moves tensors between the ranks of a group, over MPI or torch.distributed.

A group of one rank calls only the barrier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

Wait: TypeAlias = Callable[[], object]


class Transport(ABC):
    """Communication in a group of ranks. Results are new tensors on the device of the input.

    `staged`: whether tensors on a device are copied through host memory.
    """

    def __init__(self, rank: int, size: int, staged: bool) -> None:
        self.rank, self.size, self.staged = rank, size, staged
        self._sends: list[Wait] = []

    def all_gather(self, share: torch.Tensor) -> torch.Tensor:
        """Gather (...) of each rank to (n, ...) on all ranks."""
        return self._collective("all_gather", self._all_gather, share, (self.size, *share.shape))

    def reduce_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        """Reduce (n, ...) of each rank to the sum of all ranks' parts for this rank (...)."""
        return self._collective("reduce_scatter", self._reduce_scatter, parts, parts.shape[1:])

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        """Exchange (n, ...), a part for each rank, for (n, ...), a part from each rank."""
        return self._collective("all_to_all", self._all_to_all, parts, parts.shape)

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum (...) over the ranks."""
        return self._collective("all_reduce", self._all_reduce, partial, partial.shape)

    def shift(self, block: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start sending a block to the next rank of the ring; call the result for the previous rank's block."""
        device, outgoing = block.device, self._outgoing(block)
        incoming = torch.empty_like(outgoing)
        waits = self._exchange(incoming, outgoing, (self.rank - 1) % self.size, (self.rank + 1) % self.size)

        def finish() -> torch.Tensor:
            for wait in waits:
                wait()
            return self._incoming(incoming, device)

        return finish

    def send(self, message: torch.Tensor, to: int) -> None:
        """Start sending a message; `flush` waits until it is sent."""
        outgoing = self._outgoing(message)
        self._sends.append(self._send(outgoing, to))

    def recv(self, like: torch.Tensor, source: int) -> torch.Tensor:
        """Wait for a message of the shape and type of `like`."""
        incoming = torch.empty_like(like, device="cpu" if self.staged else like.device)
        self._recv(incoming, source)
        return self._incoming(incoming, like.device)

    def flush(self) -> None:
        """Wait until every message is sent."""
        for wait in self._sends:
            wait()
        self._sends.clear()

    @abstractmethod
    def blocks(self, size: int) -> Transport:
        """Return the transport of this rank's block of `size` neighbouring ranks. All ranks call this."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources of this transport."""

    def _collective(
        self, op: str, call: Callable[[Any, Any], None], given: torch.Tensor, shape: tuple[int, ...]
    ) -> torch.Tensor:
        if self.size == 1:
            return given.reshape(shape).clone()
        source = self._outgoing(given)
        result = source.new_empty(shape)
        call(result, source)
        return self._incoming(result, given.device)

    def _outgoing(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor as the library requires it: contiguous, without gradient, in host memory if staged."""
        tensor = tensor.detach().contiguous()
        return tensor.cpu() if self.staged else tensor

    def _incoming(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.to(device) if self.staged else tensor

    # Each fills its first argument, the result, from the second.
    @abstractmethod
    def _all_gather(self, whole: torch.Tensor, share: torch.Tensor) -> None: ...

    @abstractmethod
    def _reduce_scatter(self, share: torch.Tensor, parts: torch.Tensor) -> None: ...

    @abstractmethod
    def _all_to_all(self, received: torch.Tensor, parts: torch.Tensor) -> None: ...

    @abstractmethod
    def _all_reduce(self, total: torch.Tensor, partial: torch.Tensor) -> None: ...

    @abstractmethod
    def _exchange(self, incoming: torch.Tensor, outgoing: torch.Tensor, source: int, to: int) -> list[Wait]: ...

    @abstractmethod
    def _send(self, outgoing: torch.Tensor, to: int) -> Wait: ...

    @abstractmethod
    def _recv(self, incoming: torch.Tensor, source: int) -> None: ...
