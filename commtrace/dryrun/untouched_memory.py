"""Tensors that use no memory until they are touched.

Large blocks come from the system as zeros, and use memory page by page when they are written, which a dry run never
does. Small blocks are filled with zeros. Reads therefore return the same values in every run. Old values in reused
memory could look like an overflow, and DeepSpeed would then skip a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from typing import Final

import torch

from commtrace.errors import CommtraceError

MAX_COMPUTED_ELEMENTS: Final = 1 << 14
"""Number of elements up to which a tensor is computed: indices, counters, norms."""

MAX_DATA_ELEMENTS: Final = 1 << 24
"""The same if its values come from computed tensors alone: data, and pickled objects."""

MMAP_BYTES: Final = 1 << 17
"""Number of bytes from which malloc takes a block from the system by mmap, untouched."""

_MAX_MALLOC_BYTES: Final = 12 << 30  # the overcommit heuristic of Linux (overcommit_memory 0) may refuse more
_MMAP_THRESHOLD: Final = -3  # M_MMAP_THRESHOLD of <malloc.h>
_NORESERVE: Final = 0x4000  # MAP_NORESERVE of <sys/mman.h>


class UntouchedMemoryError(CommtraceError):
    """The system does not overcommit memory, which a dry run needs."""


_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def configure_malloc() -> None:
    """Make the C library allocate large blocks by mmap, and return them to the system when freed."""
    with contextlib.suppress(AttributeError):  # not the GNU C library
        _libc.mallopt(_MMAP_THRESHOLD, MMAP_BYTES)


def empty_tensor(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a CPU tensor of zeros whose pages are untouched.

    Raises:
        UntouchedMemoryError: The system provides no address space for it.
    """
    extent = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    nbytes = extent * dtype.itemsize
    if nbytes <= MMAP_BYTES:
        return torch.zeros(extent, dtype=dtype).as_strided(size, stride)
    if nbytes < _MAX_MALLOC_BYTES:
        with contextlib.suppress(RuntimeError):
            tensor = torch.empty_strided(size, stride, dtype=dtype)
            clear(tensor.untyped_storage())
            return tensor
    return torch.frombuffer(_mapped(nbytes), dtype=dtype).as_strided(size, stride)


def clear(storage: torch.UntypedStorage, offset: int = 0) -> None:
    """Set a storage to zero from byte `offset` on, by returning its whole pages to the system."""
    begin, end = storage.data_ptr() + offset, storage.data_ptr() + storage.nbytes()
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    # The C library may have reused freed memory, which is not zero. If madvise fails, everything is overwritten.
    if last <= first or _libc.madvise(first, last - first, mmap.MADV_DONTNEED):
        first = last = end
    ctypes.memset(begin, 0, first - begin)
    ctypes.memset(last, 0, end - last)


def _mapped(nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except (OSError, ValueError) as error:
        raise UntouchedMemoryError(
            f"the system provides no address space for {nbytes:,} bytes ({error}); check that vm.overcommit_memory is "
            "not 2, and raise vm.max_map_count or the limit on address space (ulimit -v)"
        ) from error
