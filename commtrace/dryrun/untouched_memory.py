"""Memory that costs nothing until it is touched.

Large blocks come from the system, all zero, and take up memory page by page as they are written to: nobody writes to
them. Small ones are filled with zeros. So whatever is read of a block is the same in every run: old numbers, which
memory that is used again holds, may look like an overflow, on which DeepSpeed leaves out a step.
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
"""Elements of a tensor that is still computed for real: indices, counters, norms."""

MMAP_BYTES: Final = 1 << 17
"""Bytes from which on a block comes from the system, untouched."""

_HUGE: Final = 12 << 30  # above this Linux's guess of what is too much (overcommit_memory 0) refuses ordinary requests
_MMAP_THRESHOLD: Final = -3  # of <malloc.h>
_NORESERVE: Final = 0x4000  # of <sys/mman.h>


class UntouchedMemoryError(CommtraceError):
    """The system promises no memory beyond what it has, which a dry run needs."""


_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def configure_malloc() -> None:
    """Have the C library take large blocks from the system, and give them back when they are let go of."""
    with contextlib.suppress(AttributeError):  # another C library than GNU's
        _libc.mallopt(_MMAP_THRESHOLD, MMAP_BYTES)


def empty_tensor(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the CPU whose pages nobody has touched. Raises UntouchedMemoryError."""
    extent = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    nbytes = extent * dtype.itemsize
    if nbytes <= MMAP_BYTES:
        return torch.zeros(extent, dtype=dtype).as_strided(size, stride)
    if nbytes < _HUGE:
        with contextlib.suppress(RuntimeError):
            return release_pages(torch.empty_strided(size, stride, dtype=dtype))
    return torch.frombuffer(_mapped(nbytes), dtype=dtype).as_strided(size, stride)


def release_pages(tensor: torch.Tensor) -> torch.Tensor:
    """The same, its memory all zero again and, but for its ends, taken up by nothing."""
    storage = tensor.untyped_storage()
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    # The C library may find room for a block among what it has, and then does not ask the system.
    if last <= first or _libc.madvise(first, last - first, mmap.MADV_DONTNEED):
        first = last = end
    ctypes.memset(begin, 0, first - begin)
    ctypes.memset(last, 0, end - last)
    return tensor


def _mapped(nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except (OSError, ValueError) as error:
        raise UntouchedMemoryError(
            f"the system gives no addresses for {nbytes:,} bytes ({error}); it may be set not to promise memory "
            "(vm.overcommit_memory=2), to few mappings (vm.max_map_count), or to little address space (ulimit -v)"
        ) from error
