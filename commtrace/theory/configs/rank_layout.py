"""Ranks of a job by parallel dimension, its batch sizes, and the element types that configurations name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ELEMENT_TYPES: Final = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""torch's names of the element types that DeepSpeed names."""


@dataclass(frozen=True)
class RankLayout:
    """Ranks by parallel dimension, and a step's batches."""

    world: int
    data: int
    micro_batch: int = 1
    """Sequences of one rank in one micro-batch."""
    accumulation: int = 1
    """Micro-batches of one step."""
    tensor: int = 1
    """Ranks that share a model."""
    sequence: int = 1
    """Ranks that share sequences as DeepSpeed's Ulysses does."""
    context: int = 1
    """Ranks that share sequences in a ring; to DDP and DeepSpeed they are data-parallel ones."""

    experts: int = 0
    """Ranks that have different experts; 0 where there are none."""

    @property
    def reducing(self) -> int:
        """Ranks that reduce gradients together."""
        return self.data * self.sequence * self.context
