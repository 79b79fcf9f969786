"""The reduction of a running `c10d::` call.

Before torch 2.9 Python cannot read an operator's boxed ReduceOp. There the methods of ProcessGroup that take one are
wrapped, and a call's reduction is the one that its thread has passed to such a method. Calls that C++ makes (DDP's
reducer) sum.
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
"""Whether this torch shows Python the reduction of a boxed ReduceOp."""

_METHODS: Final = (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
)  # fmt: skip
_thread: Final = threading.local()
_patches: Final = Patches()


def number(boxed: Any) -> int:
    """Return the number of a running call's reduction, as RedOpType has it."""
    if READABLE or not isinstance(boxed, torch.ScriptObject):  # direct calls on backends pass an object in Python
        # Through the method object: as an attribute it would be looked up in Python, which takes twice as long.
        return boxed._get_method("op")()  # type: ignore[no-any-return]
    return getattr(_thread, "number", int(RED_OP_TYPE.SUM))


@_patches.installer
def install() -> None:
    """Wrap the methods where torch needs it."""
    for name in () if READABLE else _METHODS:
        _patches.wrap(dist.ProcessGroup, name, _passing)


uninstall = _patches.undo


@contextmanager
def passing(reduce_op: Any) -> Iterator[None]:
    """Make `reduce_op` (a RedOpType, or its name) the reduction of this thread's calls."""
    before = getattr(_thread, "number", int(RED_OP_TYPE.SUM))
    if isinstance(reduce_op, str):
        reduce_op = RED_OP_TYPE.__members__.get(reduce_op.upper(), before)
    _thread.number = int(reduce_op)
    try:
        yield
    finally:
        _thread.number = before


def _passing(original: Callable[..., Any]) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        with passing(_find((*args, *kwargs.values()))):
            return original(*args, **kwargs)

    return method


def _find(arguments: tuple[Any, ...]) -> Any:
    """Return the reduction among a method's arguments, alone or in its options."""
    for argument in arguments:
        reduce_op = getattr(argument, "reduceOp", argument)
        if isinstance(reduce_op, (dist.ReduceOp, RED_OP_TYPE)):
            return getattr(reduce_op, "op", reduce_op)
    return RED_OP_TYPE.SUM
