"""Purposes of the calls of Hugging Face accelerate."""

from __future__ import annotations

from typing import Final

from commtrace.hooks.marked_sources import MarkedSources, Source
from commtrace.schema import Purpose

_SOURCES: Final = MarkedSources(
    Source(
        "accelerate.accelerator",
        "Accelerator",
        {
            "save_state": Purpose.CHECKPOINT_SAVED,
            "save_model": Purpose.CHECKPOINT_SAVED,
            "load_state": Purpose.CHECKPOINT_LOADED,
            "get_state_dict": Purpose.STATE_DICT,
            "gather_for_metrics": Purpose.METRICS,
            "clip_grad_norm_": Purpose.GRADIENT_NORM,
            "check_trigger": Purpose.FLAGS,
            "_prepare_fsdp2": Purpose.PARAMETERS_AT_START,
        },
    ),
    Source(
        "accelerate.data_loader",
        "",
        {
            "broadcast": Purpose.DATA,
            "broadcast_object_list": Purpose.DATA,
            "synchronize_rng_states": Purpose.RANDOM_STATE,
        },
    ),
)

install: Final = _SOURCES.install
uninstall: Final = _SOURCES.uninstall
