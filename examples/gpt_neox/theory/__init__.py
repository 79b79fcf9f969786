"""Rules that are tested with this example's programs only, and its job rows.

The rules are for tensor parallelism by DTensors, Ulysses, mixtures of experts and ring attention; `register()` adds
them to commtrace's. Unlike in GPT-NeoX, a pipeline of one stage uses DeepSpeed's plain engine. From a checkout::

    python -m examples.gpt_neox.theory theory tiny ring.yml --world-size 8
    python -m examples.gpt_neox.theory check logs/ring
"""

from __future__ import annotations

from commtrace.theory.configs.gpt_neox import planning
from commtrace.theory.rules import schemes
from examples.gpt_neox.config import TrainingConfig

from . import dtensor, experts, ring_attention, ulysses
from .fsdp_job_rows import fsdp_rows


def register() -> None:
    """Add the rules to commtrace's, and the rows of this example's engines."""
    schemes.SCHEMES["dtensor", "parallelize_module", None] = dtensor.predict
    schemes.EXTENSIONS["DTensor"] = dtensor.extend_prediction
    schemes.EXTENSIONS["sequence"] = ulysses.extend_prediction
    schemes.EXTENSIONS["expert"] = experts.extend_prediction
    schemes.EXTENSIONS["context"] = ring_attention.extend_prediction
    planning.ENGINE_ROWS["fsdp"] = planning.EngineRows(TrainingConfig, fsdp_rows)
    planning.ENGINE_ROWS["deepspeed"] = planning.EngineRows(TrainingConfig, planning.plain_or_staged_rows)
