"""GPT-NeoX model and the loss on its logits.

``layer_specs`` lists the layers in order; the model and the pipeline are built from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .config import TrainingConfig
from .experts import Experts, balance, has_experts
from .layers import Block, Embedding, Head, RowLinear
from .sequence import ULYSSES, Parts
from .tensor_parallel import ALONE, Shares, VocabularyCrossEntropy, sum_gradients

Build = Callable[[nn.Parameter | None], nn.Module]


@dataclass(frozen=True)
class LayerSpec:
    """Name and constructor of a layer; ``build`` gets the embedding's matrix, for a head that shares it."""

    name: str
    build: Build


def layer_specs(config: TrainingConfig, shares: Shares = ALONE) -> list[LayerSpec]:
    """Return the layers of the model in order."""
    blocks = [
        LayerSpec(f"block_{index}", functools.partial(_block, config, shares, index))
        for index in range(config.num_layers)
    ]
    return [
        LayerSpec("embedding", lambda _: Embedding(config, shares)),
        *blocks,
        LayerSpec("final_norm", lambda _: nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)),
        LayerSpec("head", lambda shared: Head(config, None if config.no_weight_tying else shared, shares)),
    ]


def _block(config: TrainingConfig, shares: Shares, index: int, _: nn.Parameter | None) -> Block:
    return Block(config, shares, mlp=Experts(config) if has_experts(config, index) else None)


class _LayerGroup(nn.Sequential):
    """Consecutive layers, with the load-balancing loss of their experts."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output of the last layer, and `experts.balance`."""
        for layer in self:
            x = layer(x)
        return x, balance(self)


class GPTNeoX(nn.Module):
    """GPT-NeoX decoder from token ids (b, s) to logits (b, s, V/t); t is 1 without tensor parallelism.

    It has exactly GPT-NeoX's number of parameters: 2Vh + L(12h^2 + 13h) + 2h, less Vh with tied embeddings.
    """

    def __init__(self, config: TrainingConfig, shares: Shares = ALONE) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        self.shares = shares
        self.neox_args: SimpleNamespace | None = None  # set by the engine, as in GPT-NeoX
        self.balance: torch.Tensor | None = None  # load-balancing loss of the last forward pass
        shared: nn.Parameter | None = None
        for spec in layer_specs(config, shares):
            layer = spec.build(shared)
            if isinstance(layer, Embedding):
                shared = layer.weight
            self.layers[spec.name] = layer
        sum_gradients(_sequence_parallel_parameters(self), shares)
        self.checkpoint_every = config.checkpoint_num_layers if config.checkpoint_activations else 0
        self.reentrant = config.checkpoint_reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (b, s) integers to (b, s, V/t)."""
        x, self.balance = tokens, None
        for group, recompute in self._layer_groups():
            again = recompute and self.training
            x, more = checkpoint(group, x, use_reentrant=self.reentrant) if again else group(x)
            if more is not None:
                self.balance = more if self.balance is None else self.balance + more
        return x

    def _layer_groups(self) -> Iterator[tuple[_LayerGroup, bool]]:
        """Yield the layers in groups: ``checkpoint_num_layers`` blocks are recomputed together, other layers never."""
        layers = list(self.layers.values())
        start = 0
        while start < len(layers):
            recompute = self.checkpoint_every > 0 and isinstance(layers[start], Block)
            end = start + 1
            while recompute and end - start < self.checkpoint_every and isinstance(layers[end], Block):
                end += 1
            yield _LayerGroup(*layers[start:end]), recompute
            start = end


def _sequence_parallel_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that act on each token separately: norms, and biases after sums."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            yield from module.parameters()
        elif isinstance(module, RowLinear) and module.bias is not None:
            yield module.bias


def language_model_loss(logits: torch.Tensor, labels: torch.Tensor, shares: Shares = ALONE) -> torch.Tensor:
    """Return the mean cross entropy in fp32 of logits (b, s, V/t) against the next tokens (b, s).

    The mean is over this rank's part of the sequences; under Ulysses, which gathers the losses, over all of them.
    """
    if shares.parts.way == ULYSSES:
        return _gathered_loss(logits, labels, shares.parts)
    if shares.ranks > 1:
        losses: torch.Tensor = VocabularyCrossEntropy.apply(logits.float(), labels, shares)  # type: ignore[no-untyped-call]
        return losses.mean()
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def _gathered_loss(logits: torch.Tensor, labels: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Compute the loss with DeepSpeed's function, whose gradients are those of this rank's part; ZeRO sums them."""
    from deepspeed.sequence.cross_entropy import (  # type: ignore[import-untyped, unused-ignore]
        vocab_sequence_parallel_cross_entropy,
    )

    losses: torch.Tensor = vocab_sequence_parallel_cross_entropy(
        logits.float().transpose(0, 1), labels.transpose(0, 1), parts.group
    )
    return losses.mean()


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups, as in GPT-NeoX: matrices decay, biases and layer norms do not.

    With two groups, ZeRO-1 and 2 have two flat buffers and gather parameters twice a step.
    """
    norms = {id(p) for module in model.modules() if isinstance(module, nn.LayerNorm) for p in module.parameters()}
    decaying: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (plain if id(parameter) in norms or name.endswith("bias") else decaying).append(parameter)
    return [{"params": decaying, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
