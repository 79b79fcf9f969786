"""The hook of Megatron-Core's optimizers, which communicate around torch's optimizers and end the training step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

from commtrace.current_step import progress
from commtrace.hooks.marked_sources import MarkedSources, Source
from commtrace.hooks.torch import training as torch_training
from commtrace.patching import Patches, around
from commtrace.schema import Phase, Purpose

MODULE: Final = "megatron.core.optimizer.optimizer"

_SOURCES: Final = MarkedSources(
    *(
        Source(
            MODULE,
            optimizer,
            {
                **dict.fromkeys(("get_grad_norm", "clip_grad_norm"), Purpose.GRADIENT_NORM),
                "count_zeros": Purpose.METRICS,  # logged with --log-num-zeros-in-grad
                "_unscale_main_grads_and_check_for_nan": Purpose.GRADIENT_OVERFLOW,
            },
        )
        for optimizer in ("MegatronOptimizer", "MixedPrecisionOptimizer", "ChainedOptimizer")
    )
)

_patches = Patches()


@around
def _step(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if torch_training.steps.engine_marks_steps:  # within the step of an optimizer that consists of several
        return original(*args, **kwargs)
    progress.note_activity()
    progress.micro_batch = -1
    try:
        with torch_training.steps.suspended(), progress.marked(Phase.OPTIMIZER):
            return original(*args, **kwargs)
    finally:
        progress.finish_step()


@_patches.installer
def install() -> None:
    """Hook `step` of the optimizers, and mark their calls."""
    for optimizer in [*vars(sys.modules[MODULE]).values()]:
        if isinstance(optimizer, type) and optimizer.__module__ == MODULE:
            _patches.wrap(optimizer, "step", _step)
    _patches.include(_SOURCES)


uninstall = _patches.undo
