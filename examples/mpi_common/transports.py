"""Moving tensors between the ranks of a group: over MPI, or over torch.distributed in its place.

Every transport counts what it moves in nccl-tests' sizes, bytes of: all_gather, the gathered output; reduce_scatter,
the input; all_to_all, the send buffer; all_reduce, the buffer; send and recv, the message. A group of one rank moves
nothing and calls nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from .stopwatch import COMMUNICATION, COPY_BACK, COPY_OUT, Stopwatch

Traffic: TypeAlias = "Counter[tuple[str, int]]"
"""Calls by operation and payload (bytes)."""
Wait: TypeAlias = Callable[[], object]


class Transport(ABC):
    """The ranks of a group. Results are new tensors on the device of what was given.

    staged: what is on a device goes by way of host memory, and the two copies are timed as parts of their own.
    """

    def __init__(self, rank: int, size: int, watch: Stopwatch, staged: bool) -> None:
        self.rank, self.size, self.watch, self.staged = rank, size, watch, staged
        self.traffic: Traffic = Counter()
        self._sends: list[Wait] = []

    def all_gather(self, share: torch.Tensor) -> torch.Tensor:
        """(...) of each rank to (n, ...) on all ranks."""
        return self._collective("all_gather", self._all_gather, share, (self.size, *share.shape))

    def reduce_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        """(n, ...) of each rank to the sum of all ranks' parts for this one (...)."""
        return self._collective("reduce_scatter", self._reduce_scatter, parts, parts.shape[1:])

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        """(n, ...), a part for each rank, to (n, ...), a part from each rank."""
        return self._collective("all_to_all", self._all_to_all, parts, parts.shape)

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """(...) to the sum (...) over the ranks."""
        return self._collective("all_reduce", self._all_reduce, partial, partial.shape)

    def shift(self, block: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start sending a block to the next rank of the ring; call the result for the previous rank's block."""
        device, outgoing = block.device, self._outgoing(block)
        incoming = torch.empty_like(outgoing)
        with self.watch(COMMUNICATION):
            waits = self._exchange(incoming, outgoing, (self.rank - 1) % self.size, (self.rank + 1) % self.size)
        self._count("send", outgoing)
        self._count("recv", incoming)

        def finish() -> torch.Tensor:
            with self.watch(COMMUNICATION):
                for wait in waits:
                    wait()
            return self._incoming(incoming, device)

        return finish

    def send(self, message: torch.Tensor, to: int) -> None:
        """Start sending a message; `flush` says when it has left."""
        outgoing = self._outgoing(message)
        with self.watch(COMMUNICATION):
            self._sends.append(self._send(outgoing, to))
        self._count("send", outgoing)

    def recv(self, like: torch.Tensor, source: int) -> torch.Tensor:
        """Wait for a message of the shape and type of `like`."""
        incoming = torch.empty_like(like, device="cpu" if self.staged else like.device)
        with self.watch(COMMUNICATION):
            self._recv(incoming, source)
        self._count("recv", incoming)
        return self._incoming(incoming, like.device)

    def flush(self) -> None:
        """Wait until every message has left."""
        with self.watch(COMMUNICATION):
            for wait in self._sends:
                wait()
        self._sends.clear()

    @abstractmethod
    def blocks(self, size: int) -> Transport:
        """The `size` neighbouring ranks that this one is among. All ranks call this; `size` divides their number."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def close(self) -> None:
        """Leave what was set up for this transport."""

    def _collective(
        self, op: str, call: Callable[[Any, Any], None], given: torch.Tensor, shape: tuple[int, ...]
    ) -> torch.Tensor:
        if self.size == 1:
            return given.reshape(shape).clone()
        source = self._outgoing(given)
        result = source.new_empty(shape)
        with self.watch(COMMUNICATION):
            call(result, source)
        self._count(op, max(source, result, key=torch.Tensor.numel))
        return self._incoming(result, given.device)

    def _count(self, op: str, payload: torch.Tensor) -> None:
        self.traffic[op, payload.numel() * payload.element_size()] += 1

    def _outgoing(self, tensor: torch.Tensor) -> torch.Tensor:
        """As the library takes it: contiguous, without gradient, and in host memory where it takes no other."""
        tensor = tensor.detach().contiguous()
        if not self.staged:
            return tensor
        with self.watch(COPY_OUT):
            return tensor.cpu()

    def _incoming(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if not self.staged:
            return tensor
        with self.watch(COPY_BACK):
            return tensor.to(device)

    # What a library does with (result, source).
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
