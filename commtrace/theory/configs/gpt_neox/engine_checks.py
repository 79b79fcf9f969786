"""What an engine cannot train, told of the configuration alone: before anything starts, or where nothing shall."""

from __future__ import annotations

from commtrace.errors import ConfigError

from .config import NeoxConfig


def check_engine(config: NeoxConfig, engine: str) -> None:
    """Raise :class:`ConfigError` for what the engine ("deepspeed", "ddp", "fsdp") does not have."""
    if config.model_parallel_size > 1 and engine == "deepspeed" and config.zero_stage == 3:
        raise ConfigError("tensor parallelism goes with ZeRO 0 to 2 here; set model_parallel_size to 1 with ZeRO-3")
    _check_shared_sequences(config, engine)
    _check_experts(config, engine)


def _check_shared_sequences(config: NeoxConfig, engine: str) -> None:
    """Raise :class:`ConfigError` for ways to share sequences that the engine does not have."""
    if config.sequence_parallel_size > 1 and engine != "deepspeed":
        raise ConfigError(f"sequence_parallel_size is DeepSpeed's; set it to 1 with --engine {engine}")
    if config.context_parallel_size > 1 and engine == "fsdp":
        raise ConfigError("attention in a ring goes with DDP and DeepSpeed here; set context_parallel_size to 1")
    if config.sequence_parallel and engine == "fsdp":
        raise ConfigError("sequence_parallel is Megatron's; with --engine fsdp say fsdp.sequence_parallel instead")
    if engine == "fsdp" and config.fsdp.sequence_parallel and config.seq_length % config.model_parallel_size:
        raise ConfigError(
            f"fsdp.sequence_parallel: model_parallel_size, which is {config.model_parallel_size}, must divide "
            f"seq_length, which is {config.seq_length}"
        )
    if config.sequence_parallel_size > 1 and config.zero_stage == 3:
        raise ConfigError("Ulysses goes with ZeRO 0 to 2 here; set sequence_parallel_size to 1 with ZeRO-3")


def _check_experts(config: NeoxConfig, engine: str) -> None:
    """Raise :class:`ConfigError` for experts that the engine does not have."""
    if config.moe_num_experts > 1 and (engine != "deepspeed" or config.zero_stage == 3):
        raise ConfigError("experts are DeepSpeed's, with ZeRO 0 to 2; leave moe_num_experts out, or change the engine")
