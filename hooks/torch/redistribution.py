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
from commtrace.hooks.call_site import is_autograd_function
from commtrace.hooks.torch.recomputation import ENGINE, recomputing
from commtrace.patching import Patches
from commtrace.schema import Purpose

_PACKAGE: Final = "torch.distributed.tensor"
_CALLERS: Final = tuple(f"{_PACKAGE}.{name}" for name in ("_redistribute", "_dispatch", "_api", "_random"))
_WRAPPING: Final = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
"""Attributes of modules that wrap another one: they are not part of a name."""

_patches = Patches()
_names: weakref.WeakKeyDictionary[Module, str] = weakref.WeakKeyDictionary()
_numbers: dict[tuple[Any, ...], int] = {}
"""Number of a purpose by its name, the name of the module, and the placements."""


@_patches.installer
def install() -> None:
    """Hook the modules of torch that redistribute."""
    # No import statement: the package is still being imported.
    modules = [sys.modules[name] for name in _CALLERS if name in sys.modules]
    for module in modules:
        _patches.wrap(module, "redistribute_local_tensor", _MARKING)
        _patches.wrap(module, "distribute_tensor", purposes.marking(Purpose.PARAMETERS_AT_START))
    tracker = getattr(sys.modules.get(f"{_PACKAGE}._random"), "OffsetBasedRNGTracker", None)
    if tracker is not None:
        _patches.wrap(tracker, "__init__", purposes.marking(Purpose.RANDOM_STATE))
    _patches.on_undo(_names.clear)
    _patches.on_undo(_numbers.clear)


uninstall = _patches.undo


def _purpose(_: Any, current_spec: Any, target_spec: Any, *__: Any, **___: Any) -> int:
    before, after = current_spec.placements, target_spec.placements
    if before == after:
        return 0
    caller = _Caller()
    if caller.recomputes:
        purpose = Purpose.ACTIVATIONS_RECOMPUTED
    elif caller.in_backward:
        purpose = Purpose.ACTIVATION_GRADIENTS
    else:
        purpose = Purpose.ACTIVATIONS if caller.module else Purpose.OPTIMIZER if caller.optimizer else Purpose.TENSORS
    key = purpose._value_, caller.module, before, after
    known = _numbers.get(key)
    if known is None:
        facts = {"module": caller.module} if caller.module else {}
        known = purposes.number(purpose, **facts, **{"from": text_of(before), "to": text_of(after)})
        _numbers[key] = known
    if caller.in_module:
        for ctx in caller.contexts:
            setattr(ctx, purposes.FORWARD_PURPOSE, known)
    return known


_PLACEMENTS: Final = "placements", "dim", "split_factor"
_MARKING: Final = purposes.marking_in_modules((1, *_PLACEMENTS), (2, *_PLACEMENTS), read=_purpose)


def calling_module() -> str:
    """Return the name of the innermost module whose forward pass runs; "" outside of modules."""
    return _Caller().module


class _Caller:
    """What the frames above a redistribution show, as hooks/native/markers.h reads them.

    Attributes:
        module: Name of the innermost module in whose forward pass the tensor was, or is, redistributed; "": none.
        in_module: Whether it is.
        contexts: Contexts of autograd functions between the redistribution and the module.
        optimizer: Whether an optimizer steps.
        in_backward: Whether autograd runs in this thread.
        recomputes: Whether it repeats a forward pass.
    """

    def __init__(self) -> None:
        name, self.optimizer = None, False
        self.in_backward = torch._C._current_graph_task_id() >= 0
        self.recomputes = self.in_backward and recomputing()
        inner: Module | None = None
        root: Module | None = None
        self.contexts: list[Any] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code is _CALL:
                root = frame.f_locals["self"]
                if inner is None:
                    inner, name = root, _names.get(root)
                if name is not None:
                    break
            elif inner is None and is_autograd_function(code):
                self.contexts.append(frame.f_locals["ctx"])
            elif code is ENGINE:
                break  # as in a thread of autograd, which has no other frames
            elif code.co_name == "wrapper" and code.co_filename.endswith("torch/optim/optimizer.py"):
                self.optimizer = True
            frame = frame.f_back
        if inner is not None and root is not None:
            name = name or _name(inner, root)
        self.in_module = inner is not None
        for ctx in self.contexts if inner is None else ():
            name = name or purposes.facts(getattr(ctx, purposes.FORWARD_PURPOSE, 0)).get("module")
        self.module = name or ""


_CALL: Final = Module._call_impl.__code__


def _name(module: Module, root: Module) -> str:
    """Return the name of a module in its model; the name of its class for the model itself. It is kept in `_names`."""
    for name, part in root.named_modules():
        own = ".".join(step for step in name.split(".") if step not in _WRAPPING)
        _names.setdefault(part, own or type(part).__name__)
    return _names.setdefault(module, type(module).__name__)


def text_of(placements: Iterable[Any]) -> str:
    """Return placements as text, one for each dimension of the mesh, such as "S(0),R"; P for partial results.

    "_S(0, 2)" is a shard whose parts are not in the order of the ranks, as where FSDP2 shards what tensor parallelism
    has: torch's text of it.
    """
    return ",".join("P" if placement.is_partial() else str(placement) for placement in placements)
