"""GPT-NeoX's learning rate: a linear warm-up, then a decay."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .config import TrainingConfig


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Return the learning rate of a step (from 1), as GPT-NeoX's megatron/learning_rates.py computes it.

    GPT-NeoX counts from 0, so its first warm-up step has learning rate 0: half of a two-step trial.
    """
    total = config.lr_decay_iters
    warmup = config.warmup * total
    if step <= warmup:
        return config.lr * step / warmup
    done = (min(step, total) - warmup) / total
    if config.lr_decay_style == "linear":
        rate = config.lr * (1.0 - done)
    elif config.lr_decay_style == "cosine":
        rate = config.lr / 2.0 * (math.cos(math.pi * done) + 1.0)
    elif config.lr_decay_style == "exponential":
        rate = config.lr * math.exp(-0.693 * done)
    else:
        rate = config.lr
    return max(rate, config.min_lr)


def make_scheduler(config: TrainingConfig, optimizer: Optimizer) -> LambdaLR:
    """Return the schedule as a PyTorch scheduler, stepped once per optimizer step."""
    # The optimizer is made with learning rate 1, so that the factor is the rate itself, and rates of 0 are possible.
    return LambdaLR(optimizer, lambda done: learning_rate(config, done + 1))
