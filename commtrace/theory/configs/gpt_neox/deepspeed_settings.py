"""GPT-NeoX's keys as DeepSpeed's configuration, made as GPT-NeoX makes it."""

from __future__ import annotations

from typing import Any

from .config import NeoxConfig


def deepspeed_config(config: NeoxConfig, micro_batch: int, accumulation: int, verbose: bool) -> dict[str, Any]:
    """Return the dictionary for ``deepspeed.initialize``.

    With `verbose`, DeepSpeed prints and measures every few steps, where the files say so.
    """
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": config.gradient_clipping,
        "zero_optimization": dict(config.zero_optimization),
        # The optimizer is PyTorch's; with offloading DeepSpeed would demand its own, which it compiles on first use.
        "zero_force_ds_cpu_optimizer": False,
        **config.deepspeed_keys,
    }
    if config.precision != "fp32":
        settings[config.precision] = {**config.precision_block, "enabled": True}
    if config.pipe_parallel_size > 1:
        settings["pipeline"] = {"use_reentrant": config.checkpoint_reentrant, **settings.get("pipeline", {})}
    if not verbose:
        # GPT-NeoX's files switch these on. They print every few steps, and the timers wait for the device at each call.
        settings.update(steps_per_print=10**9, wall_clock_breakdown=False)
    return settings
