"""Ranks of a job by parallel dimension, its batch sizes, and the element types that configurations name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ELEMENT_TYPES: Final = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""torch's names of element types by DeepSpeed's."""


@dataclass(frozen=True)
class RankLayout:
    """Ranks by parallel dimension, and batch sizes of a step.

    Attributes:
        world: Ranks of the job.
        data: Data-parallel ranks.
        micro_batch: Sequences of one rank in a micro-batch.
        accumulation: Micro-batches of a step.
        tensor: Ranks that share a model.
        sequence: Ranks that share sequences by DeepSpeed's Ulysses.
        context: Ranks that share sequences in a ring; to DDP and DeepSpeed they are data-parallel.
        experts: Ranks that have different experts; 0 without experts.
    """

    world: int
    data: int
    micro_batch: int = 1
    accumulation: int = 1
    tensor: int = 1
    sequence: int = 1
    context: int = 1
    experts: int = 0

    @property
    def reducing(self) -> int:
        """Ranks that reduce gradients together."""
        return self.data * self.sequence * self.context
