"""Purposes of the calls of Hugging Face transformers: its Trainer, saved models, and generation."""

from __future__ import annotations

from typing import Final

from commtrace.hooks import purposes
from commtrace.hooks.marked_sources import MarkedSources, Source, evaluating
from commtrace.schema import Purpose

_SAVED: Final = dict.fromkeys(
    ("_save_checkpoint", "save_model", "_save_optimizer_and_scheduler"), Purpose.CHECKPOINT_SAVED
)
_LOADED: Final = dict.fromkeys(
    (
        *("_load_from_checkpoint", "_load_best_model", "_load_optimizer_and_scheduler", "_load_rng_state"),
        *("_load_scaler", "_load_callback_state"),
    ),
    Purpose.CHECKPOINT_LOADED,
)

_SOURCES: Final = MarkedSources(
    Source(
        "transformers.trainer",
        "Trainer",
        {
            **_SAVED,
            **_LOADED,
            "_get_num_items_in_batch": Purpose.LOSS,  # the number of tokens by which it is divided
            "_maybe_log_save_evaluate": Purpose.METRICS,
            "_track_num_input_tokens": Purpose.METRICS,
            "store_flos": Purpose.METRICS,
            "_sync_replicated_trainable_parameters": Purpose.PARAMETERS_AT_START,
        },
    ),
    Source(
        "transformers.trainer",
        "Trainer",
        dict.fromkeys(("evaluation_loop", "prediction_loop"), Purpose.EVALUATION),
        evaluating,
    ),
    Source("transformers.trainer", "", {"deepspeed_load_checkpoint": Purpose.CHECKPOINT_LOADED}),
    Source(
        "transformers.modeling_utils",
        "PreTrainedModel",
        {"save_pretrained": Purpose.CHECKPOINT_SAVED, "from_pretrained": Purpose.CHECKPOINT_LOADED},
    ),
    Source(
        "transformers.generation.utils",
        "GenerationMixin",
        {"_has_unfinished_sequences": Purpose.FLAGS},
        purposes.marking_unclaimed,
    ),
)

install: Final = _SOURCES.install
uninstall: Final = _SOURCES.uninstall
