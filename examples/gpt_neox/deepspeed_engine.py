"""Training with DeepSpeed's engine: ZeRO 0 to 3, configured from GPT-NeoX's keys as GPT-NeoX does it."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence

import torch

from commtrace.errors import ConfigError
from commtrace.theory.configs.gpt_neox.engine_settings import deepspeed_config, neox_args

from .config import TrainingConfig
from .experts import separate_experts
from .model import GPTNeoX, language_model_loss, weight_decay_groups
from .mpu import make_mpu, shares_of
from .schedule import make_scheduler


def forbid_compiling() -> None:
    """Keep DeepSpeed from compiling its shared-memory operator on CPU machines.

    ``init_distributed`` compiles it if the table of compatible operators lists it, as it does on every Linux, with or
    without a compiler. Training does not use it (only ``inference_all_reduce`` does). There is no option for it, but
    DeepSpeed computes the table only once and documents that edits to it persist.
    """
    import deepspeed  # type: ignore[import-untyped, unused-ignore]

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def prepare_import(device: torch.device, verbose: bool) -> None:
    """Set environment and warnings before DeepSpeed is first imported."""
    if device.type == "cpu":
        # Otherwise DeepSpeed looks for devices and warns on every rank that it found none.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if not verbose:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # Several times a step, DeepSpeed calls functions that newer versions of PyTorch deprecate.
        warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)


class DeepSpeedEngine:
    """Engine that trains the model with DeepSpeed."""

    def __init__(
        self, config: TrainingConfig, device: torch.device, micro_batch: int, accumulation: int, verbose: bool
    ) -> None:
        import deepspeed

        settings = deepspeed_config(config, micro_batch, accumulation, verbose)
        # ZeRO-3 partitions the model while it is built, so that no rank ever holds all of it.
        mpu = make_mpu(config)
        self._shares = shares_of(config, mpu)
        self._part = self._shares.parts.of
        with deepspeed.zero.Init(config_dict_or_path=settings, enabled=config.zero_stage == 3), device:
            model = GPTNeoX(config, self._shares)
        model.neox_args = neox_args(config, micro_batch, accumulation)
        groups = weight_decay_groups(model, config.weight_decay)
        if config.moe_num_experts > 1:
            groups = separate_experts(groups)
        optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(config.betas[0], config.betas[1]), eps=config.eps)
        # The scheduler must set the first learning rate before `initialize`: in 16 bits without ZeRO, DeepSpeed takes a
        # step with zero gradients there, to allocate Adam's state, and weight decay would use the rate of 1.
        scheduler = make_scheduler(config, optimizer)
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=settings, mpu=mpu
        )

    @staticmethod
    def initialise(backend: str, verbose: bool) -> None:
        """Create the process group, from the environment."""
        import deepspeed

        forbid_compiling()
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=verbose)

    def train_step(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run one optimizer step; return the mean loss of this rank's micro-batches (a scalar, without gradient)."""
        losses = []
        for batch in micro_batches:
            loss = language_model_loss(self._engine(self._part(batch[:, :-1])), self._part(batch[:, 1:]), self._shares)
            balance = self._engine.module.balance
            self._engine.backward(loss if balance is None else loss + balance)
            self._engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def close(self) -> None:
        """Remove DeepSpeed's hooks and destroy the process group."""
        import deepspeed

        self._engine.destroy()
        deepspeed.comm.destroy_process_group()  # clears DeepSpeed's cache of groups, too


_QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


def check_quantization(config: TrainingConfig, device: torch.device) -> None:
    """Raise :class:`ConfigError` if ZeRO++ would quantize without a GPU, which DeepSpeed detects only late."""
    requested = [name for name in _QUANTIZED if config.zero_optimization.get(name)]
    if requested and device.type == "cpu":
        origin = config.origins.get("zero_optimization", "no file")
        raise ConfigError(
            f"{origin}: zero_optimization: {requested[0]} needs a GPU; on a CPU DeepSpeed fails later with "
            '"This op had not been implemented on CPU backend.": leave it out'
        )


def check_zero_block(config: TrainingConfig) -> None:
    """Raise :class:`ConfigError` for a ``zero_optimization`` block that DeepSpeed would refuse."""
    from deepspeed.runtime import config as known  # type: ignore[import-untyped, unused-ignore]
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # type: ignore[import-untyped, unused-ignore]

    # Settings of removed features, such as MiCS, are refused elsewhere.
    refuse = getattr(known, "_reject_removed_config_keys", lambda _: None)
    try:
        refuse({"zero_optimization": dict(config.zero_optimization)})
        DeepSpeedZeroConfig(**config.zero_optimization)
    except (TypeError, ValueError, known.DeepSpeedConfigError) as error:
        origin = config.origins.get("zero_optimization", "no file")
        raise ConfigError(f"{origin}: zero_optimization: DeepSpeed does not accept this block: {error}") from error
