"""Training with DeepSpeed's pipeline: each stage has some of the layers and sends activations to the next.

Ranks are in GPT-NeoX's order: stages outermost, then data parallelism, tensor parallelism innermost.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence

import torch

from commtrace.errors import ConfigError
from commtrace.theory.configs.gpt_neox.engine_settings import deepspeed_config, neox_args

from .config import TrainingConfig
from .deepspeed_engine import forbid_compiling
from .model import weight_decay_groups
from .mpu import tensor_shares
from .schedule import make_scheduler


class PipelineEngine:
    """Stage of this rank under DeepSpeed's pipeline engine; micro-batches are gradient accumulation steps."""

    def __init__(
        self, config: TrainingConfig, device: torch.device, micro_batch: int, accumulation: int, verbose: bool
    ) -> None:
        import deepspeed  # type: ignore[import-untyped, unused-ignore]
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

        from .pipeline_model import GPT2ModelPipe, attention_mask

        settings = deepspeed_config(config, micro_batch, accumulation, verbose)
        data = config.data_parallel(torch.distributed.get_world_size())
        topology = PipeModelDataParallelTopology(
            num_pp=config.pipe_parallel_size, num_mp=config.model_parallel_size, num_dp=data
        )
        # DeepSpeed prints the topology and the partition of the layers.
        with contextlib.nullcontext() if verbose else contextlib.redirect_stdout(io.StringIO()):
            with device:
                model = GPT2ModelPipe(config, tensor_shares(config), topology)
            model.neox_args = neox_args(config, micro_batch, accumulation)
            groups = [group for group in weight_decay_groups(model, config.weight_decay) if group["params"]]
            optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(config.betas[0], config.betas[1]), eps=config.eps)
            scheduler = make_scheduler(config, optimizer)
            self._engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, lr_scheduler=scheduler, config=settings
            )
        self._mask = attention_mask(config.seq_length, device)

    @staticmethod
    def initialise(backend: str, verbose: bool) -> None:
        """Create the process group, from the environment."""
        import deepspeed

        forbid_compiling()
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=verbose)

    def train_step(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run one optimizer step; return the mean loss of the pipeline's micro-batches (scalar, without gradient)."""
        self._engine.train_batch(iter([((batch[:, :-1], self._mask), batch[:, 1:]) for batch in micro_batches]))
        loss: torch.Tensor = self._engine.dp_group_loss
        return loss

    def close(self) -> None:
        """Remove DeepSpeed's hooks and destroy the process group."""
        import deepspeed

        self._engine.destroy()
        deepspeed.comm.destroy_process_group()  # clears DeepSpeed's cache of groups, too


def check_stages(config: TrainingConfig) -> None:
    """Raise :class:`ConfigError` for stages that DeepSpeed's pipeline would hang or fail in.

    A stage without transformer layers has no biases or norms, and therefore one optimizer group fewer than the other
    stages, with which it exchanges a number per group. Only hidden states with a mask can be sent between stages
    (DeepSpeed treats the last tensor as the mask), so the function that drops the mask must be in the last stage.
    """
    from .pipeline_model import stage_layers

    *stages, last = stage_layers(config)
    empty = [number for number, names in enumerate(stages) if "ParallelTransformerLayerPipe" not in names]
    if empty or "_post_transformer_block" not in last:
        origin = config.origins.get("pipe_parallel_size", "no file")
        what = f"stage {empty[0]} would have" if empty else "the last one would begin behind"
        raise ConfigError(
            f"{origin}: pipe_parallel_size: {config.pipe_parallel_size} stages of {config.num_layers} transformer "
            f"layers: {what} {'none' if empty else 'all'} of them (pipe_partition_method "
            f"{config.pipe_partition_method}); take fewer stages, or another method"
        )
