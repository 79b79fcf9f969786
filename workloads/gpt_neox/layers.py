"""The layers of a GPT-NeoX decoder. Each takes one tensor and gives one tensor back, so that they can be put in a row.

Shapes: b batch, s sequence, h hidden size, a heads, d head size, V padded vocabulary.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.nn import functional

from .config import NeoxConfig


def init_std(method: str, config: NeoxConfig) -> float:
    """Standard deviation of an initialisation method of GPT-NeoX (megatron/model/init_functions.py)."""
    if method == "scaled_normal":
        return config.init_method_std / math.sqrt(2.0 * config.num_layers)
    if method == "small_init":
        return math.sqrt(2.0 / (5.0 * config.hidden_size))
    if method == "wang_init":
        return 2.0 / config.num_layers / math.sqrt(config.hidden_size)
    return config.init_method_std


class Linear(nn.Module):
    """``x @ weight.T + bias``, drawn from a normal distribution when it is built.

    It draws in its constructor because ZeRO-3 takes each module's parameters apart as soon as its constructor ends:
    an initialisation that walks over the finished model would find empty shards.
    """

    def __init__(
        self, inputs: int, outputs: int, std: float, bias: bool = True, weight: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs).normal_(0.0, std)) if weight is None else weight
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., inputs) to (..., outputs)."""
        return functional.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """Token ids (b, s) to vectors (b, s, h)."""

    def __init__(self, config: NeoxConfig) -> None:
        super().__init__()
        std = init_std(config.init_method, config)
        self.weight = nn.Parameter(torch.empty(config.padded_vocab_size, config.hidden_size).normal_(0.0, std))
        self.dropout = config.hidden_dropout

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(b, s) integers to (b, s, h)."""
        return functional.dropout(functional.embedding(tokens, self.weight), self.dropout, self.training)


@functools.lru_cache(maxsize=8)
def rotary_tables(
    length: int, dims: int, base: float, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (length, dims) of position times frequency, the second half repeating the first.

    A cached function and not a buffer of each layer: DDP broadcasts buffers before every forward pass, which would be
    communication that this model has no need of.
    """
    frequency = 1.0 / base ** (torch.arange(0, dims, 2, device=device, dtype=torch.float32) / dims)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: torch.Tensor, dims: int, base: float) -> torch.Tensor:
    """Rotary positions (arXiv 2104.09864) on the first ``dims`` of d in (b, a, s, d), pairing i with i + dims/2."""
    cos, sin = rotary_tables(x.shape[-2], dims, base, x.device, x.dtype)
    turned, rest = x[..., :dims], x[..., dims:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


class Attention(nn.Module):
    """Causal self-attention with one fused query-key-value projection and rotary positions."""

    def __init__(self, config: NeoxConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.heads, self.head_size = config.num_attention_heads, config.head_size
        self.rotary_dims, self.rotary_base = config.rotary_dims, config.rotary_emb_base
        self.dropout = config.attention_dropout
        self.query_key_value = Linear(hidden, 3 * hidden, init_std(config.init_method, config))
        self.dense = Linear(hidden, hidden, init_std(config.output_layer_init_method, config))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(b, s, h) to (b, s, h)."""
        batch, length, hidden = x.shape
        # (b, s, a, 3d), the layout of GPT-NeoX: each head's query, key and value lie together, so that a slice of the
        # projection's rows is a set of whole heads.
        qkv = self.query_key_value(x).view(batch, length, self.heads, 3 * self.head_size).transpose(1, 2)
        query, key, value = qkv.chunk(3, dim=-1)
        query = rotate(query, self.rotary_dims, self.rotary_base)
        key = rotate(key, self.rotary_dims, self.rotary_base)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: torch.Tensor = self.dense(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return out


class MLP(nn.Module):
    """h to 4h, gelu, and back."""

    def __init__(self, config: NeoxConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.dense_h_to_4h = Linear(hidden, 4 * hidden, init_std(config.init_method, config))
        self.dense_4h_to_h = Linear(4 * hidden, hidden, init_std(config.output_layer_init_method, config))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(b, s, h) to (b, s, h)."""
        out: torch.Tensor = self.dense_4h_to_h(functional.gelu(self.dense_h_to_4h(x)))
        return out


class Block(nn.Module):
    """One transformer layer: attention and MLP, each behind a layer norm, in turn or side by side (GPT-J)."""

    def __init__(self, config: NeoxConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.attention = Attention(config)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.mlp = MLP(config)
        self.parallel = config.gpt_j_residual
        self.dropout = config.hidden_dropout

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, self.dropout, self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(b, s, h) to (b, s, h)."""
        attended = x + self._drop(self.attention(self.input_layernorm(x)))
        seen = x if self.parallel else attended
        return attended + self._drop(self.mlp(self.post_attention_layernorm(seen)))


class Head(Linear):
    """Vectors (b, s, h) to logits (b, s, V), with a matrix of its own or the embedding's."""

    def __init__(self, config: NeoxConfig, tied: nn.Parameter | None) -> None:
        std = init_std(config.init_method, config)
        super().__init__(config.hidden_size, config.padded_vocab_size, std, bias=False, weight=tied)
