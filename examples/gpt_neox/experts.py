"""Mixtures of experts (DeepSpeed's): several MLPs, of which each token sees the few that a gate chooses.

Ranks hold different experts: two all_to_alls bring tokens there and results back, forward and again backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from commtrace.theory.configs.gpt_neox.config import NeoxConfig

from .layers import MLP


class Experts(nn.Module):
    """In the place of one MLP, with what GPT-NeoX gives DeepSpeed's layer."""

    def __init__(self, config: NeoxConfig) -> None:
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
        """(b, s, h) to (b, s, h)."""
        out: torch.Tensor = self.moe(x)[0]
        return out

    @property
    def balance(self) -> torch.Tensor:
        """How unevenly the last forward pass chose, as a part of the loss."""
        loss: torch.Tensor = self.moe.deepspeed_moe.l_aux * self.weight
        return loss


def balance(layers: Iterable[nn.Module]) -> torch.Tensor | None:
    """Of all experts in these layers; None where there are none."""
    found = [part.balance for layer in layers for part in layer.modules() if isinstance(part, Experts)]
    return torch.stack(found).sum() if found else None


def has_experts(config: NeoxConfig, layer: int) -> bool:
    """Whether the layer of that number, from 0, has experts: every `moe_expert_interval`-th, the first one on."""
    return config.moe_num_experts > 1 and layer % config.moe_expert_interval == 0


def apart(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The optimizer's groups with experts in groups of their own, as ZeRO needs them; DeepSpeed's own function."""
    from deepspeed.moe.utils import (  # type: ignore[import-untyped, unused-ignore]
        split_params_into_different_moe_groups_for_optimizer,
    )

    named = [{"name": f"group {number}", **group} for number, group in enumerate(groups)]
    found: list[dict[str, Any]] = split_params_into_different_moe_groups_for_optimizer(named)
    return found
