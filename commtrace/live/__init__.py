"""Numbers of the running training, for the logger that already has its loss.

    metrics = commtrace.live.step_metrics()          # once, in the process that logs
    for step, values in metrics.new():               # after each step; does not wait
        logger.log(values, step=step)
    for step, values in metrics.end():               # at the end of the training

step_metrics          any loop
trainer_callback      Hugging Face Trainer: trainer_callback(trainer)
lightning_callback    Lightning: Trainer(callbacks=[lightning_callback()])
deepspeed_monitor     DeepSpeed: DeepSpeedMonitor(engine)

Another process, `commtrace metrics --json`, reads the log of the run and measures its steps, so that the training
neither computes nor communicates for it, nor waits for a device. Without tracing, there are no numbers.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .deepspeed_monitor import DeepSpeedMonitor
    from .lightning_callback import lightning_callback
    from .step_metrics import StepMetrics, step_metrics
    from .trainer_callback import trainer_callback

__all__ = ["DeepSpeedMonitor", "StepMetrics", "lightning_callback", "step_metrics", "trainer_callback"]

_ON_FIRST_USE = {
    "StepMetrics": "step_metrics", "step_metrics": "step_metrics", "trainer_callback": "trainer_callback",
    "lightning_callback": "lightning_callback", "DeepSpeedMonitor": "deepspeed_monitor",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module 'commtrace.live' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"commtrace.live.{_ON_FIRST_USE[name]}"), name)
    return value
