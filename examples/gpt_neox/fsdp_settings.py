"""The block `fsdp` of a configuration: how `--engine fsdp` shards a model. Not a key of GPT-NeoX, which has no FSDP."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from commtrace.errors import ConfigError
from commtrace.theory.configs.gpt_neox.field_types import Boolean, OptionalCount


def _flag_or_ranks(value: Any) -> Any:
    """Accept true, false, and a number of ranks of at least 2."""
    if isinstance(value, bool):
        return value
    try:
        ranks = float(value)
    except (TypeError, ValueError):
        ranks = 0.0
    if ranks < 2 or not ranks.is_integer():
        raise ValueError("it must be true, false, or a whole number of at least 2")
    return int(ranks)


class FsdpSettings(BaseModel):
    """Settings of `torch.distributed.fsdp.fully_shard`; the defaults are PyTorch's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reshard_after_forward: Annotated[bool | int | None, BeforeValidator(_flag_or_ranks)] = None
    """Whether layers are resharded after their forward pass. A number: to that many ranks only. None: all layers, but
    not the root, whose own parameters stay gathered."""
    shard_size: OptionalCount = None
    """Ranks that parameters are sharded over. Fewer than the data-parallel ranks: the rest replicates (HSDP). None:
    all of them."""
    sync_every_micro_batch: Boolean = False  # reduce gradients in each micro-batch, not only in the last one of a step
    reshard_after_backward: Boolean = True  # whether layers are resharded between the micro-batches of a step
    sequence_parallel: Boolean = False  # whether ranks shard the sequence between tensor-parallel layers

    def shards(self, data_parallel: int) -> int:
        """Return the number of ranks that parameters are sharded over.

        Args:
            data_parallel: Data-parallel ranks of the job.

        Raises:
            ConfigError: If the settings do not divide that number of ranks.
        """
        size = data_parallel if self.shard_size is None else self.shard_size
        if data_parallel % size:
            raise ConfigError(f"fsdp.shard_size: {size} does not divide the {data_parallel} data-parallel ranks")
        within = self.reshard_after_forward
        if not isinstance(within, bool) and within is not None and (within < 2 or size % within or within == size):
            raise ConfigError(
                f"fsdp.reshard_after_forward: {within} is neither true, nor false, nor a divisor of the {size} ranks "
                "that share parameters, between 1 and all of them"
            )
        return size
