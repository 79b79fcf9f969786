"""What this example communicates that GPT-NeoX, DeepSpeed and PyTorch do not: ring attention, and its use of FSDP2.

`register()` enters its rules into commtrace's. Commands with them, from a checkout::

    python -m examples.gpt_neox.theory theory tiny ring.yml --world-size 8
    python -m examples.gpt_neox.theory check logs/ring
"""

from __future__ import annotations

from commtrace.theory.configs.gpt_neox import planning
from commtrace.theory.rules import schemes
from examples.gpt_neox.config import TrainingConfig

from . import ring_attention
from .fsdp_job_rows import fsdp_rows


def register() -> None:
    """Let commtrace predict this example's ring attention, and its FSDP from configuration files."""
    schemes.EXTENSIONS["context"] = ring_attention.extend_prediction
    planning.ENGINE_ROWS["fsdp"] = planning.EngineRows(TrainingConfig, fsdp_rows)
