"""Sets of storages: those without computed values, and those on a simulated device.

Whole storages are members, so that all tensors that share memory agree. This package calls tensor methods unbound,
because some programs set attributes named `stride` or `size` on their tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.multiprocessing import reductions

_WeakStorage: Any = reductions.StorageWeakRef  # torch does not annotate it

numel: Final = torch.Tensor.numel
storage_of: Final = torch.Tensor.untyped_storage


class StorageSet:
    """A set of weakly referenced storages."""

    def __init__(self) -> None:
        # A weak reference keeps the address of a storage from being reused, but does not keep its memory.
        self._storages: dict[int, Any] = {}
        self._sweep_size = 1 << 12

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor)._cdata in self._storages

    def has(self, storage: torch.UntypedStorage | torch.TypedStorage) -> bool:
        """Return whether a storage is in the set."""
        return storage._cdata in self._storages

    def any(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether the storage of any of these tensors is in the set."""
        return any(storage_of(tensor)._cdata in self._storages for tensor in tensors)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Add the storages of tensors."""
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = _WeakStorage(storage)
        if len(self._storages) > self._sweep_size:
            self._storages = {key: storage for key, storage in self._storages.items() if not storage.expired()}
            self._sweep_size = 2 * max(len(self._storages), 1 << 11)

    def discard(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remove the storages of tensors."""
        for tensor in tensors:
            self._storages.pop(storage_of(tensor)._cdata, None)

    def discard_overwritten(self, tensor: torch.Tensor) -> None:
        """Remove the storage of a tensor that was filled with computed values, if the tensor covers all of it."""
        if tensor.nbytes == storage_of(tensor).nbytes():
            self.discard([tensor])


def has_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory of its own: sparse tensors and those that wrap others have none."""
    try:
        storage_of(tensor)
    except (NotImplementedError, RuntimeError):
        return False
    return True
