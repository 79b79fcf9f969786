"""The reduction of a running `c10d::` call.

Before torch 2.9, Python cannot read an operator's boxed ReduceOp. In those versions, the methods of ProcessGroup that
take a ReduceOp are wrapped, and the reduction of a call is the one that its thread passed to such a method. Calls made
in C++ (DDP's reducer) are sums.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist

from .patching import Patches

RED_OP_TYPE: Any = dist.ReduceOp.RedOpType
READABLE: Final = hasattr(torch.classes.c10d.ReduceOp(), "op")
"""Whether Python can read the reduction of a boxed ReduceOp in this version of torch."""

_METHODS: Final = (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
)  # fmt: skip
_thread: Final = threading.local()
_patches: Final = Patches()


def number(boxed: Any) -> int:
    """Return the reduction of a running call as a number of RedOpType."""
    if READABLE or not isinstance(boxed, torch.ScriptObject):  # direct calls of backends pass a Python object
        # Through the method object, because attribute lookup in Python takes twice as long.
        return boxed._get_method("op")()  # type: ignore[no-any-return]
    return getattr(_thread, "number", int(RED_OP_TYPE.SUM))


@_patches.installer
def install() -> None:
    """Wrap the methods if this version of torch requires it."""
    for name in () if READABLE else _METHODS:
        _patches.wrap(dist.ProcessGroup, name, _pass_reduction)


uninstall = _patches.undo


@contextmanager
def passing(reduce_op: Any) -> Iterator[None]:
    """Make `reduce_op` (a RedOpType, or its name) the reduction of this thread's calls."""
    previous = getattr(_thread, "number", int(RED_OP_TYPE.SUM))
    if isinstance(reduce_op, str):
        reduce_op = RED_OP_TYPE.__members__.get(reduce_op.upper(), previous)
    _thread.number = int(reduce_op)
    try:
        yield
    finally:
        _thread.number = previous


def _pass_reduction(original: Callable[..., Any]) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        with passing(_find_reduction((*args, *kwargs.values()))):
            return original(*args, **kwargs)

    return method


def _find_reduction(arguments: tuple[Any, ...]) -> Any:
    """Return the reduction among a method's arguments, passed alone or in an options object."""
    for argument in arguments:
        reduce_op = getattr(argument, "reduceOp", argument)
        if isinstance(reduce_op, (dist.ReduceOp, RED_OP_TYPE)):
            return getattr(reduce_op, "op", reduce_op)
    return RED_OP_TYPE.SUM
