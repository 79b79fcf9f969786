"""Numbers of steps in the loggers of Hugging Face's Trainer."""

from __future__ import annotations

import copy
from typing import Any

from commtrace.current_step import progress

from .step_metrics import Step, prefixed, step_metrics

_PRINTING = ("ProgressCallback", "PrinterCallback", "NotebookProgressCallback")
"""Callbacks that show what is logged, in the order of steps: they get the loss alone."""


def trainer_callback(trainer: Any) -> Any:
    """Add a callback to a Trainer, and return it.

    It passes the numbers of the steps that the Trainer logs (`logging_steps`) to its loggers (`report_to`) and its
    `state.log_history`, with the step that the loss of the same step has, from 1.

    Args:
        trainer: A `transformers.Trainer`.
    """
    from transformers import TrainerCallback

    class CommtraceCallback(TrainerCallback):  # type: ignore[misc]
        """Logs numbers of commtrace beside the loss."""

        def __init__(self) -> None:
            self.metrics = step_metrics()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Log the steps that were measured meanwhile."""
            if state.is_world_process_zero:
                _log(trainer, args, state, control, self.metrics.new())

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Log the last steps."""
            if state.is_world_process_zero:
                _log(trainer, args, state, control, self.metrics.end())

    callback = CommtraceCallback()
    # Before the loggers, which may close their files at the end of the training.
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback


def _log(trainer: Any, args: Any, state: Any, control: Any, steps: list[Step]) -> None:
    every = max(1, int(getattr(state, "logging_steps", 0) or args.logging_steps or 1))
    handler = trainer.callback_handler
    earlier = state.global_step - 1 - progress.step  # steps before this process began
    for step, values in steps:
        if (number := earlier + step + 1) % every:
            continue
        of_step = copy.copy(state)
        of_step.global_step = number
        logs = prefixed(values)
        state.log_history.append({**logs, "step": number})
        for callback in handler.callbacks:
            if type(callback).__name__ not in _PRINTING:
                callback.on_log(args, of_step, control, logs=logs, model=handler.model)
