"""The hook of GPT-NeoX's training loop: where steps begin, forward passes with their batches and losses, evaluations.

DeepSpeed's engine without a pipeline is called after the batch was broadcast, and returns before the loss is computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from commtrace.patching import Patches
from commtrace.progress import progress
from commtrace.schema import Phase

_patches = Patches()


def install() -> None:
    """Hook `megatron.training`. Does nothing if it is hooked already, or where it lacks the functions (Megatron-LM)."""
    if _patches:
        return
    module = sys.modules["megatron.training"]
    _patches.wrap(module, "train_step", _train_step)
    _patches.wrap(module, "forward_step", progress.wrapper(Phase.FORWARD))
    _patches.wrap(module, "evaluate", progress.wrapper(Phase.EVALUATION))


def uninstall() -> None:
    """Restore the functions."""
    _patches.undo()


def _train_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def train_step(*args: Any, **kwargs: Any) -> Any:
        progress.activity()
        return original(*args, **kwargs)

    return train_step
