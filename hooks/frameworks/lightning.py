"""Purposes of the calls of Lightning, Fabric and torchmetrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from commtrace.hooks.marked_sources import MarkedSources, Source, evaluating
from commtrace.schema import Purpose

_CONNECTORS: Final = "trainer.connectors"
_CHECKPOINT_CALLBACK: Final = dict.fromkeys(
    (
        *("setup", "on_train_batch_end", "on_train_epoch_end", "on_validation_end", "on_train_end", "on_exception"),
        *("_save_topk_checkpoint", "_save_last_checkpoint", "_save_none_monitor_checkpoint"),
    ),
    Purpose.CHECKPOINT_SAVED,
)
_METRICS: Final = dict.fromkeys(("update", "compute"), Purpose.METRICS)
_RESTORING: Final = dict.fromkeys(
    ("resume_start", "restore", "restore_datamodule", "restore_model", "restore_training_state"),
    Purpose.CHECKPOINT_LOADED,
)

# Module below `lightning.pytorch` (or `pytorch_lightning`), class, methods.
_TRAINER: Final = (
    ("trainer.trainer", "Trainer", {"save_checkpoint": Purpose.CHECKPOINT_SAVED}),
    (f"{_CONNECTORS}.checkpoint_connector", "_CheckpointConnector", _RESTORING),
    (f"{_CONNECTORS}.logger_connector.result", "_ResultMetric", _METRICS),
    (f"{_CONNECTORS}.signal_connector", "_SignalConnector", {"_sigterm_notifier_fn": Purpose.FLAGS}),
    ("callbacks.model_checkpoint", "ModelCheckpoint", _CHECKPOINT_CALLBACK),
    ("callbacks.early_stopping", "EarlyStopping", {"_run_early_stopping_check": Purpose.FLAGS}),
    ("callbacks.timer", "Timer", {"_check_time_remaining": Purpose.FLAGS}),
    ("loops.training_epoch_loop", "_TrainingEpochLoop", {"_broadcast_sigterm_tensor": Purpose.FLAGS}),
    *(
        (f"loops.{loop}", "", {"has_len_all_ranks": Purpose.DATA})
        for loop in ("fit_loop", "evaluation_loop", "prediction_loop")
    ),
)
_LOOPS: Final = (
    ("loops.evaluation_loop", "_EvaluationLoop", {"run": Purpose.EVALUATION}, evaluating),
    ("loops.prediction_loop", "_PredictionLoop", {"run": Purpose.EVALUATION}, evaluating),
)
_FABRIC: Final = (
    (
        "fabric",
        "Fabric",
        {
            "save": Purpose.CHECKPOINT_SAVED,
            "load": Purpose.CHECKPOINT_LOADED,
            "load_raw": Purpose.CHECKPOINT_LOADED,
            "clip_gradients": Purpose.GRADIENT_NORM,
        },
    ),
)


def _below(packages: tuple[str, str], sources: Sequence[tuple[Any, ...]]) -> Iterator[Source]:
    """Yield sources in both packages with the same contents: `lightning`, and the one for this part alone."""
    for package in packages:
        for module, *rest in sources:
            yield Source(f"{package}.{module}", *rest)


_SOURCES: Final = MarkedSources(
    *_below(("lightning.pytorch", "pytorch_lightning"), (*_TRAINER, *_LOOPS)),
    *_below(("lightning.fabric", "lightning_fabric"), _FABRIC),
    Source("torchmetrics.metric", "Metric", {"_sync_dist": Purpose.METRICS}),
)

install: Final = _SOURCES.install
uninstall: Final = _SOURCES.uninstall
