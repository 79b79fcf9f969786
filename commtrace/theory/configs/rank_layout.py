"""Ranks of a job by parallel dimension, its batch sizes, and the element types that configurations name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ELEMENT_TYPES: Final = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""torch's names of element types by DeepSpeed's."""


@dataclass(frozen=True)
class RankLayout:
    """Ranks by parallel dimension, and batch sizes of a step."""

    world: int  # ranks of the job
    data: int  # data-parallel ranks
    micro_batch: int = 1  # sequences of one rank in a micro-batch
    accumulation: int = 1  # micro-batches of a step
    tensor: int = 1  # ranks that share a model
    sequence: int = 1  # ranks that share sequences by DeepSpeed's Ulysses
    context: int = 1  # ranks that share sequences in a ring; to DDP and DeepSpeed they are data-parallel
    experts: int = 0  # ranks that have different experts; 0 without experts

    @property
    def reducing(self) -> int:
        """Ranks that reduce gradients together."""
        return self.data * self.sequence * self.context
