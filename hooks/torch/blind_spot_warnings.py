"""Warnings about calls that the hooks cannot observe.

A warning is printed when such a feature is set up, so other calls have no overhead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from commtrace.errors import warn
from commtrace.patching import Patches, around
from commtrace.recording.session import session

_LOCAL_TENSORS: Final = "torch.distributed._local_tensor"
_SYMMETRIC_MEMORY: Final = ("empty_strided_p2p", "rendezvous", "get_mempool_allocator")
"""Methods of torch's `_SymmetricMemory` that allocate or share memory. Every use of it begins with one of them."""

_patches = Patches()
_local_patches = Patches()
_warned: set[str] = set()


def install() -> None:
    """Watch groups whose class is written in Python, symmetric memory, and LocalTensorMode once it is imported."""
    if not _patches:
        _patches.wrap(dist.ProcessGroup, "__init__", _init_group)
        for method in _SYMMETRIC_MEMORY if hasattr(torch._C._distributed_c10d, "_SymmetricMemory") else ():
            _patches.wrap(torch._C._distributed_c10d._SymmetricMemory, method, _use_symmetric_memory)
    if not _local_patches and _LOCAL_TENSORS in sys.modules:
        _local_patches.wrap(sys.modules[_LOCAL_TENSORS].LocalTensorMode, "__enter__", _enter_mode)


def uninstall() -> None:
    """Restore everything."""
    _patches.undo()
    _local_patches.undo()
    _warned.clear()


@around
def _init_group(original: Callable[..., None], self: Any, /, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if type(self) is not dist.ProcessGroup:
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        _warn_once(
            f"calls on groups of {name}, a class written in Python, are recorded only if the class "
            "forwards them to another backend"
        )


@around
def _enter_mode(original: Callable[..., Any], self: Any, /) -> Any:
    _warn_once("calls within LocalTensorMode are not recorded: all its ranks run in one process, and nothing is sent")
    return original(self)


@around
def _use_symmetric_memory(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    _warn_once("transfers through symmetric memory (symm_mem::) are not recorded")
    return original(*args, **kwargs)


def _warn_once(text: str) -> None:
    """Print a warning once, if tracing is on and the rank is not simulated."""
    if session.settings is not None and not session.settings.simulated and text not in _warned:
        _warned.add(text)
        warn(text)
