"""The hook of GPT-NeoX's training loop: where steps begin, forward passes with their batches and losses, evaluations.

Without a pipeline, DeepSpeed's engine is called after the batch is broadcast, and returns before the loss is computed.
"""

from __future__ import annotations

import sys

from commtrace.current_step import progress
from commtrace.patching import Patches
from commtrace.schema import Phase

from . import gpt_neox_purposes

_patches = Patches()


@_patches.installer
def install() -> None:
    """Hook the functions of `megatron.training` in GPT-NeoX. Megatron-LM's module does not have them."""
    module = sys.modules["megatron.training"]
    if _patches.wrap(module, "train_step", progress.wrapper(begins_step=True)):
        _patches.wrap(module, "forward_step", progress.wrapper(Phase.FORWARD))
        _patches.wrap(module, "evaluate", progress.wrapper(Phase.EVALUATION))
        _patches.include(gpt_neox_purposes)


uninstall = _patches.undo
