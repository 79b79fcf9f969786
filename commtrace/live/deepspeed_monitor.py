"""Numbers of steps in DeepSpeed's monitor: TensorBoard, W&B, Comet, CSV files."""

from __future__ import annotations

from typing import Any

from commtrace.current_step import progress

from .step_metrics import Step, prefixed, step_metrics


class DeepSpeedMonitor:
    """Passes the numbers of steps to the monitor of an engine, by the samples that the loss of the same step has.

        monitor = commtrace.live.DeepSpeedMonitor(engine)
        for batch in data:
            ...
            engine.step()
            monitor.update()
        monitor.end()

    Only the rank that DeepSpeed's monitor writes on does anything.
    """

    def __init__(self, engine: Any) -> None:
        """Begin with an engine, as `deepspeed.initialize` returns it."""
        self._engine, self._metrics = engine, step_metrics()
        self._writes = bool(engine.monitor.enabled) and engine.global_rank == 0

    def update(self) -> None:
        """Write the steps that were measured meanwhile, at most once a step. Does not wait."""
        if self._writes:
            self._write(self._metrics.new())

    def end(self) -> None:
        """Write the last steps, at the end of the training."""
        if self._writes:
            self._write(self._metrics.end())

    def _write(self, steps: list[Step]) -> None:
        engine = self._engine
        every = max(1, int(engine.steps_per_print() or 1))
        ended = progress.step + progress.between_steps
        for step, values in steps:
            steps_ago = ended - 1 - step
            if (engine.global_steps - steps_ago) % every == 0:
                samples = engine.global_samples - steps_ago * engine.train_batch_size()
                named = prefixed(values, "Train/commtrace/")
                engine.monitor.write_events([(name, value, samples) for name, value in named.items()])
