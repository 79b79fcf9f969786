"""The model as DeepSpeed's PipelineModule, with the layout of GPT-NeoX's `GPT2ModelPipe`.

The layers are those of `model.GPTNeoX`, with the same random weights. Stages send hidden states and, as in GPT-NeoX,
the attention mask. GPT-NeoX's two functions around the blocks also transpose (b, s, h) to (s, b, h) and back; this does
not change the bytes sent and is left out. The functions remain, because they count when layers are partitioned over
stages ("type:transformer|mlp" matches their names).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec  # type: ignore[import-untyped, unused-ignore]
from deepspeed.runtime.utils import (  # type: ignore[import-untyped, unused-ignore]
    partition_balanced,
    partition_uniform,
)
from torch import nn
from torch.nn import functional

from .config import TrainingConfig
from .layers import Block, Embedding, Head
from .model import language_model_loss, layer_specs
from .tensor_parallel import Shares

Passed = tuple[torch.Tensor, torch.Tensor]
"""Hidden states (b, s, h) and the attention mask (1, 1, s, s), true at masked positions."""

CHECKPOINTABLE: Final = ["GMLPBlock", "ParallelTransformerLayerPipe", "ParallelMambaResidualLayerPipe"]


class EmbeddingPipe(Embedding):
    """Embedding of tokens; a head that shares the matrix has the same class."""

    def __init__(self, config: TrainingConfig, shares: Shares, state: torch.Tensor) -> None:
        set_random_state(state)
        super().__init__(config, shares)

    def forward(self, inputs: Passed) -> Passed:  # type: ignore[override]
        """Map tokens (b, s) and the mask."""
        tokens, mask = inputs
        return super().forward(tokens), mask


class ParallelTransformerLayerPipe(Block):
    """Transformer layer that passes the mask on unused: its attention is causal."""

    def __init__(self, config: TrainingConfig, shares: Shares, state: torch.Tensor) -> None:
        set_random_state(state)
        super().__init__(config, shares)

    def forward(self, inputs: Passed) -> Passed:  # type: ignore[override]
        """Map hidden states and the mask."""
        x, mask = inputs
        return super().forward(x), mask


class NormPipe(nn.LayerNorm):
    """Norm after the last transformer layer."""


class ParallelLinearPipe(Head):
    """Head with its own matrix."""

    def __init__(self, config: TrainingConfig, shares: Shares, state: torch.Tensor) -> None:
        set_random_state(state)
        super().__init__(config, None, shares)


def _pre_transformer_block(inputs: Passed) -> Passed:
    return inputs


def _post_transformer_block(inputs: Passed) -> torch.Tensor:
    return inputs[0]


def _tied_head(embedding: EmbeddingPipe, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(embedding.shares.copied(x), embedding.weight)


class GPT2ModelPipe(PipelineModule):  # type: ignore[misc, unused-ignore]
    """Stage of this rank. DeepSpeed recognizes the class name: its outputs end with an attention mask."""

    def __init__(self, config: TrainingConfig, shares: Shares, topology: Any) -> None:
        interval = config.checkpoint_num_layers if config.checkpoint_activations else 0
        super().__init__(
            layers=pipe_specs(config, shares, random_states(config, shares)),
            topology=topology,
            loss_fn=partial(_loss, shares),
            partition_method=config.pipe_partition_method,
            activation_checkpoint_interval=interval,
            checkpointable_layers=CHECKPOINTABLE,
        )


def _loss(shares: Shares, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return language_model_loss(logits, labels, shares)


def pipe_specs(config: TrainingConfig, shares: Shares, states: Sequence[torch.Tensor]) -> list[Any]:
    """Return GPT-NeoX's layers in order; each stage builds its own. `states`: the result of `random_states`."""
    first, *blocks, _, last = states
    norm = LayerSpec(NormPipe, config.hidden_size, eps=config.layernorm_epsilon)
    layers = (LayerSpec(ParallelTransformerLayerPipe, config, shares, state) for state in blocks)
    inner = [_pre_transformer_block, *layers, _post_transformer_block, norm]
    if config.no_weight_tying:
        embedding = LayerSpec(EmbeddingPipe, config, shares, first)
        return [embedding, *inner, LayerSpec(ParallelLinearPipe, config, shares, last)]
    tied = partial(TiedLayerSpec, "embed", EmbeddingPipe, config, shares, first, tied_weight_attr="weight")
    return [tied(), *inner, tied(forward_fn=_tied_head)]


def random_states(config: TrainingConfig, shares: Shares) -> list[torch.Tensor]:
    """Return the state of the random generator before each layer of the whole model.

    With it, a stage, which builds only some layers, draws the weights of the whole model. Each layer is built once and
    discarded: there is no other way to advance the generator past its weights.
    """
    states = []
    for spec in layer_specs(config, shares):
        states.append(_random_state())
        spec.build(None)
    return states


def _random_state() -> torch.Tensor:
    return torch.cuda.get_rng_state() if _on_cuda() else torch.get_rng_state()


def set_random_state(state: torch.Tensor) -> None:
    """Set the state of the generator of the device on which layers are built."""
    if _on_cuda():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def _on_cuda() -> bool:
    return torch.get_default_device().type == "cuda"


def attention_mask(length: int, device: torch.device) -> torch.Tensor:
    """Return the causal mask (1, 1, s, s), true above the diagonal."""
    return torch.ones(1, 1, length, length, device=device).tril() < 0.5


# --- how DeepSpeed will partition the layers ------------------------------------------------------------------------


def stage_layers(config: TrainingConfig) -> list[list[str]]:
    """Return the names of each stage's layers, without building them."""
    shares = Shares(0, config.model_parallel_size)
    specs = pipe_specs(config, shares, [torch.get_rng_state()] * (config.num_layers + 3))
    names = [spec.typename.__name__ if isinstance(spec, LayerSpec) else spec.__name__ for spec in specs]
    bounds = _bounds(config, specs, names)
    return [names[begin:end] for begin, end in pairwise(bounds)]


def _bounds(config: TrainingConfig, specs: Sequence[Any], names: Sequence[str]) -> list[int]:
    method = config.pipe_partition_method.lower()
    if method == "uniform":
        return list(partition_uniform(len(specs), config.pipe_parallel_size))
    if method == "parameters":
        weights = [_elements(spec) for spec in specs]
    else:
        weights = [int(bool(re.search(method.partition(":")[2], name, re.IGNORECASE))) for name in names]
    return list(partition_balanced(weights, config.pipe_parallel_size))


def _elements(spec: Any) -> int:
    if not isinstance(spec, LayerSpec):
        return 0
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in spec.build().parameters())
