"""Tensors whose memory costs nothing until it is touched.

Large blocks come from the system, all zero, and use memory page by page when they are written, which a dry run never
does. Small blocks are filled with zeros. All reads therefore return the same in every run: old values in reused memory
may look like an overflow, after which DeepSpeed skips a step.
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
"""Elements up to which a tensor is computed: indices, counters, norms."""

MMAP_BYTES: Final = 1 << 17
"""Bytes from which on a block comes from the system by mmap, untouched."""

_HUGE: Final = 12 << 30  # above this Linux's guess of what is too much (overcommit_memory 0) refuses ordinary requests
_MMAP_THRESHOLD: Final = -3  # of <malloc.h>
_NORESERVE: Final = 0x4000  # of <sys/mman.h>


class UntouchedMemoryError(CommtraceError):
    """The system does not overcommit memory, which a dry run needs."""


_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def configure_malloc() -> None:
    """Make the C library allocate large blocks by mmap, and return them to the system when they are freed."""
    with contextlib.suppress(AttributeError):  # not the GNU C library
        _libc.mallopt(_MMAP_THRESHOLD, MMAP_BYTES)


def empty_tensor(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a CPU tensor of zeros whose pages are untouched.

    Raises:
        UntouchedMemoryError: The system gives no address space for it.
    """
    extent = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    nbytes = extent * dtype.itemsize
    if nbytes <= MMAP_BYTES:
        return torch.zeros(extent, dtype=dtype).as_strided(size, stride)
    if nbytes < _HUGE:
        with contextlib.suppress(RuntimeError):
            tensor = torch.empty_strided(size, stride, dtype=dtype)
            clear(tensor.untyped_storage())
            return tensor
    return torch.frombuffer(_mapped(nbytes), dtype=dtype).as_strided(size, stride)


def clear(storage: torch.UntypedStorage, offset: int = 0) -> None:
    """Set a storage to zero, from a byte on, by returning its whole pages to the system."""
    begin, end = storage.data_ptr() + offset, storage.data_ptr() + storage.nbytes()
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    # The C library may reuse memory that it has, instead of the system's. If madvise is refused, all is overwritten.
    if last <= first or _libc.madvise(first, last - first, mmap.MADV_DONTNEED):
        first = last = end
    ctypes.memset(begin, 0, first - begin)
    ctypes.memset(last, 0, end - last)


def _mapped(nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except (OSError, ValueError) as error:
        raise UntouchedMemoryError(
            f"the system gives no addresses for {nbytes:,} bytes ({error}); it may be set not to promise memory "
            "(vm.overcommit_memory=2), to few mappings (vm.max_map_count), or to little address space (ulimit -v)"
        ) from error
