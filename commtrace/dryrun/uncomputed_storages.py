"""Which memory holds nothing that is true: it was never computed, or follows from what was not.

By storage: whatever looks at the same memory is the same. What is not listed is real: data that the program loaded,
numbers that it made from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing import reductions

_WeakStorage: Any = reductions.StorageWeakRef  # torch does not annotate it


class UncomputedStorages:
    """The storages that hold nothing true."""

    def __init__(self) -> None:
        # A weak reference keeps the address of a storage from being used again, but not its memory.
        self._storages: dict[int, Any] = {}
        self._swept_at = 1 << 12

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def any(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of them is unknown."""
        return any(tensor.untyped_storage()._cdata in self._storages for tensor in tensors)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """These hold nothing true from here on."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = _WeakStorage(storage)
        if len(self._storages) > self._swept_at:
            self._sweep()

    def overwritten(self, tensor: torch.Tensor) -> None:
        """This was written to with something true; what lies beside it in its storage was not."""
        storage = tensor.untyped_storage()
        if tensor.nbytes == storage.nbytes():
            self._storages.pop(storage._cdata, None)

    def _sweep(self) -> None:
        self._storages = {key: storage for key, storage in self._storages.items() if not storage.expired()}
        self._swept_at = 2 * max(len(self._storages), 1 << 11)
