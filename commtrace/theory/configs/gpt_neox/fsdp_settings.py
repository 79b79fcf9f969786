"""The block `fsdp` of a configuration: how `--engine fsdp` shards a model. Not a key of GPT-NeoX, which has no FSDP."""

from __future__ import annotations

from dataclasses import dataclass

from commtrace.errors import ConfigError

from .yaml_files import Reader


@dataclass(frozen=True)
class FsdpSettings:
    """Defaults are those of torch.distributed.fsdp.fully_shard, and of who follows its guide."""

    reshard_after_forward: bool | int | None = None
    """Whether layers are taken apart again behind their forward pass; a number: over so many ranks only; None: all
    but the model itself, which keeps what is no layer's."""
    shard_size: int | None = None
    """Ranks among which parameters are divided; fewer than there are: the others hold copies (HSDP). None: all."""
    sync_every_micro_batch: bool = False
    """Gradients are reduced in each micro-batch, not in the last of a step alone."""
    reshard_after_backward: bool = True
    """Whether layers are taken apart between the micro-batches of a step."""
    sequence_parallel: bool = False
    """Tensor-parallel ranks divide the sequence between their layers."""

    def shards(self, data_parallel: int) -> int:
        """Ranks among which parameters are divided, of so many data-parallel ones."""
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


def fsdp_settings(reader: Reader) -> FsdpSettings:
    """The checked block; the defaults without one."""
    block = reader.inside("fsdp")
    reshard = block.raw("reshard_after_forward")
    if reshard is not None and not isinstance(reshard, bool):
        reshard = block.integer("reshard_after_forward", low=2)
    size = block.raw("shard_size")
    found = FsdpSettings(
        reshard,
        None if size is None else block.integer("shard_size"),
        block.flag("sync_every_micro_batch", False),
        block.flag("reshard_after_backward", True),
        block.flag("sequence_parallel", False),
    )
    unknown = [*block.unknown()]
    if unknown:
        raise reader.error("fsdp", f"it knows no {', '.join(unknown)}; leave that out")
    return found
