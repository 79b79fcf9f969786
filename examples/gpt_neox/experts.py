"""Mixture of experts with DeepSpeed: a gate chooses a few of several MLPs for each token.

Ranks hold different experts: in forward and in backward, two all_to_alls move tokens to their experts and results back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .config import TrainingConfig
from .layers import MLP


class Experts(nn.Module):
    """DeepSpeed's MoE layer in place of an MLP, with GPT-NeoX's settings."""

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE  # type: ignore[import-untyped, unused-ignore]

        self.moe = MoE(
            config.hidden_size,
            MLP(config),
            num_experts=config.moe_num_experts,
            ep_size=config.moe_expert_parallel_size,
            k=config.moe_top_k,
            capacity_factor=config.moe_train_capacity_factor,
            min_capacity=config.moe_min_capacity,
            drop_tokens=config.moe_token_dropping,
        )
        self.weight = config.moe_loss_coeff

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (b, s, h) to (b, s, h)."""
        out: torch.Tensor = self.moe(x)[0]
        return out

    @property
    def balance(self) -> torch.Tensor:
        """Load-balancing loss of the last forward pass, weighted."""
        loss: torch.Tensor = self.moe.deepspeed_moe.l_aux * self.weight
        return loss


def balance(layers: Iterable[nn.Module]) -> torch.Tensor | None:
    """Return the sum of the load-balancing losses of these layers; None without experts."""
    losses = [part.balance for layer in layers for part in layer.modules() if isinstance(part, Experts)]
    return torch.stack(losses).sum() if losses else None


def has_experts(config: TrainingConfig, layer: int) -> bool:
    """Return whether a layer (numbered from 0) has experts: every `moe_expert_interval`-th, from the first on."""
    return config.moe_num_experts > 1 and layer % config.moe_expert_interval == 0


def separate_experts(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the optimizer's groups with experts in separate groups, as ZeRO requires."""
    from deepspeed.moe.utils import (  # type: ignore[import-untyped, unused-ignore]
        split_params_into_different_moe_groups_for_optimizer,
    )

    named = [{"name": f"group {number}", **group} for number, group in enumerate(groups)]
    separated: list[dict[str, Any]] = split_params_into_different_moe_groups_for_optimizer(named)
    return separated
