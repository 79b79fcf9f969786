"""Hook for DTensor: every redistribution, with its placements, and the module whose tensor it is.

One function communicates for all of them: `redistribute_local_tensor`. The frames above it show why it was called:
the innermost module of a forward pass, autograd, an optimizer, or the program itself.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any, Final

import torch
from torch.nn import Module

from commtrace.hooks import purposes
from commtrace.hooks.torch.recomputation import recomputing
from commtrace.patching import Patches
from commtrace.schema import Purpose

_PACKAGE: Final = "torch.distributed.tensor"
_CALLERS: Final = tuple(f"{_PACKAGE}.{name}" for name in ("_redistribute", "_dispatch", "_api", "_random"))
_WRAPPING: Final = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
"""Attributes of modules that wrap another one: they are not part of a name."""

_patches = Patches()
_names: weakref.WeakKeyDictionary[Module, str] = weakref.WeakKeyDictionary()


@_patches.installer
def install() -> None:
    """Hook the modules of torch that redistribute."""
    # No import statement: the package is still being imported.
    modules = [sys.modules[name] for name in _CALLERS if name in sys.modules]
    for module in modules:
        _patches.wrap(module, "redistribute_local_tensor", purposes.marking_each(_purpose))
        _patches.wrap(module, "distribute_tensor", purposes.marking(Purpose.PARAMETERS_AT_START))
    tracker = getattr(sys.modules.get(f"{_PACKAGE}._random"), "OffsetBasedRNGTracker", None)
    if tracker is not None:
        _patches.wrap(tracker, "__init__", purposes.marking(Purpose.RANDOM_STATE))
    _patches.on_undo(_names.clear)


uninstall = _patches.undo


def _purpose(_: Any, current_spec: Any, target_spec: Any, *__: Any, **___: Any) -> int:
    if not purposes.unclaimed() or current_spec.placements == target_spec.placements:
        return 0
    caller = _Caller()
    if recomputing():
        purpose = Purpose.ACTIVATIONS_RECOMPUTED
    elif torch._C._current_graph_task_id() >= 0:
        purpose = Purpose.ACTIVATION_GRADIENTS
    else:
        purpose = Purpose.ACTIVATIONS if caller.module else Purpose.OPTIMIZER if caller.optimizer else Purpose.TENSORS
    facts = {"module": caller.module} if caller.module else {}
    placements = {"from": _text(current_spec.placements), "to": _text(target_spec.placements)}
    return purposes.number(purpose, **facts, **placements)


def calling_module() -> str:
    """Return the name of the innermost module whose forward pass runs; "" outside of modules."""
    return _Caller().module


class _Caller:
    """What the frames above a redistribution show.

    Attributes:
        module: Name of the innermost module in whose forward pass the tensor was, or is, redistributed; "": none.
        optimizer: Whether an optimizer steps.
    """

    def __init__(self) -> None:
        self.module, self.optimizer = "", False
        inner: Module | None = None
        root: Module | None = None
        saved: list[Any] = []  # contexts of autograd functions between the redistribution and the module
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code is _CALL:
                root = frame.f_locals["self"]
                inner = inner or root
            elif inner is None and code.co_name in ("forward", "backward") and code.co_varnames[:1] == ("ctx",):
                saved.append(frame.f_locals["ctx"])
            elif code.co_name == "wrapper" and code.co_filename.endswith("torch/optim/optimizer.py"):
                self.optimizer = True
            frame = frame.f_back
        if inner is not None and root is not None:
            self.module = _name(inner, root)
            for ctx in saved:
                ctx.commtrace_module = self.module  # of its backward
        else:
            self.module = next((ctx.commtrace_module for ctx in saved if hasattr(ctx, "commtrace_module")), "")


_CALL: Final = Module._call_impl.__code__


def _name(module: Module, root: Module) -> str:
    """Return the name of a module in its model; the name of its class for the model itself."""
    if module not in _names:
        for name, part in root.named_modules():
            _names.setdefault(part, ".".join(step for step in name.split(".") if step not in _WRAPPING))
    return _names.get(module) or type(module).__name__


def _text(placements: Iterable[Any]) -> str:
    """Return placements as text, one for each dimension of the mesh, such as "S(0),R"."""
    return ",".join(
        f"S({placement.dim})" if placement.is_shard() else "R" if placement.is_replicate() else "P"
        for placement in placements
    )
