"""FSDP: a training step begins where its forward begins.

FSDP gathers parameters in a forward under `no_grad`, so that the call itself cannot tell training from evaluation; the
forward that it belongs to can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import fsdp

from commtrace.progress import progress

from .patching import Patches

_patches = Patches()


def install() -> None:
    """Hook both generations of FSDP, as far as this torch has them."""
    if _patches:
        return
    _patches.wrap(fsdp.FullyShardedDataParallel, "forward", _forward)
    state = getattr(getattr(fsdp, "_fully_shard", None), "_fsdp_state", None)
    if state is not None:
        # Not `_pre_forward`: torch.compile knows that one, and models keep it as a bound method.
        _patches.wrap(state.FSDPState, "_root_pre_forward", _forward)


def uninstall() -> None:
    """Take everything out again."""
    _patches.undo()


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            progress.activity()
        return original(*args, **kwargs)

    return forward
