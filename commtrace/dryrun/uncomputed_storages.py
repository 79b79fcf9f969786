"""Storages whose values were not computed, or derive from values that were not.

A storage counts as a whole, so that all tensors in the same memory agree. All other storages hold real values: data
that the program loaded, and numbers that it computed from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing import reductions

_WeakStorage: Any = reductions.StorageWeakRef  # torch does not annotate it


class UncomputedStorages:
    """The set of storages without computed values."""

    def __init__(self) -> None:
        # A weak reference keeps the address of a storage from being used again, but not its memory.
        self._storages: dict[int, Any] = {}
        self._sweep_size = 1 << 12

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def any(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether a storage of these tensors is in the set."""
        return any(tensor.untyped_storage()._cdata in self._storages for tensor in tensors)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Add the storages of tensors."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = _WeakStorage(storage)
        if len(self._storages) > self._sweep_size:
            self._storages = {key: storage for key, storage in self._storages.items() if not storage.expired()}
            self._sweep_size = 2 * max(len(self._storages), 1 << 11)

    def overwritten(self, tensor: torch.Tensor) -> None:
        """Remove the storage of a tensor that was filled with computed values, if the tensor covers all of it."""
        storage = tensor.untyped_storage()
        if tensor.nbytes == storage.nbytes():
            self._storages.pop(storage._cdata, None)
