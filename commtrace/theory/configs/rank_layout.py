"""Ranks of a job by parallel dimension, its batch sizes, and the element types that configurations name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from commtrace.errors import ConfigError

ELEMENT_TYPES: Final = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""torch's names of element types, by DeepSpeed's names."""


@dataclass(frozen=True)
class RankLayout:
    """Ranks by parallel dimension, and batch sizes of a step."""

    world_size: int  # ranks of the job
    data_parallel_size: int  # ranks that work on different samples
    micro_batch_size: int = 1  # sequences of one rank in a micro-batch
    gradient_accumulation_steps: int = 1  # micro-batches of a step
    tensor_parallel_size: int = 1  # ranks that share a model
    sequence_parallel_size: int = 1  # ranks that share sequences by DeepSpeed's Ulysses
    context_parallel_size: int = 1  # ranks that share sequences in a ring; to DDP and DeepSpeed they are data-parallel
    expert_parallel_size: int = 0  # ranks that have different experts; 0 without experts

    @property
    def reducing(self) -> int:
        """Ranks that reduce gradients together."""
        return self.data_parallel_size * self.sequence_parallel_size * self.context_parallel_size


def complete_batch_sizes(
    data_parallel: int, micro: int | None, steps: int | None, total: int | None, source: str
) -> tuple[int, int]:
    """Return micro-batch size and gradient accumulation steps: as in DeepSpeed, any two of three sizes give the third.

    `total` is the number of sequences of a step on all ranks; `source` is its name in messages, with its file.

    Raises:
        ConfigError: If the sizes contradict each other.
    """
    if total is None:
        return micro or 1, steps or 1
    if micro is None:
        micro = total // (data_parallel * (steps or 1))
    if steps is None:
        steps = total // (data_parallel * max(micro, 1))
    if micro * steps * data_parallel != total or total == 0:
        raise ConfigError(
            f"{source} {total} is not train_micro_batch_size_per_gpu ({micro}) * "
            f"gradient_accumulation_steps ({steps}) * data-parallel ranks ({data_parallel}); change one of them, or "
            "leave train_batch_size out"
        )
    return micro, steps
