"""Numbers of steps in the loggers of Lightning."""

from __future__ import annotations

import sys
from typing import Any

from commtrace.current_step import progress

from .step_metrics import Step, prefixed, step_metrics


def lightning_callback() -> Any:
    """Return a callback for `Trainer(callbacks=[...])`.

    It passes the numbers of the steps that the trainer logs (`log_every_n_steps`) to its loggers, with the step that
    the loss of the same step has, from 0.
    """
    package = "pytorch_lightning" if "lightning.pytorch" not in sys.modules else "lightning.pytorch"
    callback: Any = __import__(package, fromlist=["Callback"]).Callback

    class CommtraceCallback(callback):  # type: ignore[misc]
        """Logs numbers of commtrace beside the loss."""

        def __init__(self) -> None:
            super().__init__()
            self.metrics = step_metrics()
            self.earlier = 0  # steps before this process began

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            """Log the steps that were measured meanwhile."""
            if trainer.is_global_zero:
                self.earlier = trainer.fit_loop.epoch_loop._batches_that_stepped - progress.step
                _log(trainer, self.earlier, self.metrics.new())

        def on_train_end(self, trainer: Any, *_: Any) -> None:
            """Log the last steps."""
            if trainer.is_global_zero:
                _log(trainer, self.earlier, self.metrics.end())

    return CommtraceCallback()


def _log(trainer: Any, earlier: int, steps: list[Step]) -> None:
    every = max(1, int(trainer.log_every_n_steps or 1))
    for step, values in steps:
        if (earlier + step + 1) % every == 0:  # Lightning's rule for the loss
            for logger in trainer.loggers:
                logger.log_metrics(prefixed(values), step=earlier + step)
