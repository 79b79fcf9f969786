"""Patches for DeepSpeed in a dry run: nothing is compiled, and the views of ZeRO-3 bypass the dispatch mode.

ZeRO-3 slices each parameter and each gradient into the partitions of all ranks: a million views per step on a thousand
ranks. The mode has nothing to do for them, and would cost as much as an operator for each.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import deepspeed
import torch
import torch._dynamo  # before zero.Init replaces torch's factory functions: importing it later fails
from deepspeed.ops.op_builder.builder import OpBuilder

from commtrace.patching import Patches

from .inert import Inert

# Functions that slice the partitions of all ranks: (module, class or "", function).
_SLICING: Final = (
    ("deepspeed.runtime.comm.coalesced_collectives", "", "reduce_scatter_coalesced"),
    ("deepspeed.runtime.zero.partitioned_param_coordinator", "PartitionedParameterCoordinator", "fetch_sub_module"),
)
# Builders of C++ optimizers, which change parameters and communicate nothing.
_OPTIMIZERS: Final = frozenset(("fused_adam", "cpu_adam", "cpu_adagrad", "cpu_lion"))

_patches: Final = Patches()


def install() -> None:
    """Patch DeepSpeed after it has been imported."""
    # Without this, DeepSpeed compiles its all_reduce through shared memory for minutes; training does not use it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _patches.wrap(OpBuilder, "load", _without_optimizers)
    for module, owner, name in _SLICING:
        with contextlib.suppress(ImportError, AttributeError):  # in another version of DeepSpeed: slower, but correct
            target = import_module(module)
            _patches.wrap(getattr(target, owner) if owner else target, name, _without_mode)


def uninstall() -> None:
    """Restore DeepSpeed's own functions."""
    _patches.undo()


# ---- views -----------------------------------------------------------------------------------------------------------


# slice.Tensor calls as_strided.
_BYPASSING: Final = [*itertools.product(("slice.Tensor", "as_strided"), ("Python", "PythonTLSSnapshot"))]
_depth = 0


def _without_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let slices of tensors bypass the mode in a function. All tensors there must be plain: subclasses are bypassed."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        global _depth
        library: Any = torch.library.Library("aten", "IMPL") if _depth == 0 else None
        _depth += 1
        try:
            for operator, key in _BYPASSING if library else ():
                library.impl(operator, torch.library.fallthrough_kernel, key)
            return original(*args, **kwargs)
        finally:
            _depth -= 1
            if library is not None:
                library._destroy()

    return wrapper


# ---- optimizers ------------------------------------------------------------------------------------------------------


def _without_optimizers(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        return Inert() if self.name in _OPTIMIZERS else original(self, *args, **kwargs)

    return load
