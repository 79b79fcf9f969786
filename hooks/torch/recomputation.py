"""Hook for `torch.utils.checkpoint`: calls of a forward pass that is repeated in a backward pass.

The functions that repeat it are marked by their code: they run for each layer, and most layers communicate nothing.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType, FunctionType
from typing import Any, Final

import torch
import torch.autograd.graph

from commtrace.hooks import purposes
from commtrace.patching import Patches

MODULE: Final = "torch.utils.checkpoint"
ENGINE: Final = purposes.code_of(torch.autograd.graph._engine_run_backward)
"""Code of the function in which autograd runs, if it runs in the thread that called it."""

_patches = Patches()


@_patches.installer
def install() -> None:
    """Mark what both implementations repeat, `use_reentrant` or not."""
    checkpoint = sys.modules[MODULE]  # no import statement: torch is still being imported
    mark_reentrant(_patches, getattr(checkpoint, "CheckpointFunction", None))
    for function in vars(checkpoint).values():  # versions of torch define it within different ones
        for constant in function.__code__.co_consts if isinstance(function, FunctionType) else ():
            if isinstance(constant, CodeType) and constant.co_name == "recompute_fn":
                purposes.mark_code(_patches, constant, purposes.RECOMPUTED)


uninstall = _patches.undo


def mark_reentrant(patches: Patches, function: Any) -> None:
    """Mark what an autograd function repeats in its `backward`, before it runs autograd for it; None: there is none."""
    purposes.mark_code(patches, purposes.code_of(getattr(function, "backward", None)), purposes.RECOMPUTED)


def recomputing() -> bool:
    """Return whether the calling thread repeats a forward pass in a backward pass."""
    if torch._C._current_graph_task_id() < 0:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not ENGINE:
        if id(frame.f_code) in purposes.codes and purposes.of_code(frame.f_code) == purposes.RECOMPUTED:
            return True
        frame = frame.f_back
    return False
