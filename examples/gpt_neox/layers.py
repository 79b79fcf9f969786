"""Layers of a GPT-NeoX decoder. Each maps one tensor to one tensor, so that they can be chained.

Shapes: b batch, s sequence, h hidden size, a heads, d head size, V padded vocabulary, t tensor-parallel ranks. `shares`
determines this rank's part of a layer. Every rank draws the weights of the whole layer and keeps its part, so that the
model does not depend on the number of ranks.
"""

from __future__ import annotations

import functools
import math
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from .config import TrainingConfig
from .sequence import attention_of
from .tensor_parallel import ALONE, Shares, mark_part


def init_std(method: str, config: TrainingConfig) -> float:
    """Return the standard deviation of an initialization method of GPT-NeoX (megatron/model/init_functions.py)."""
    if method == "scaled_normal":
        return config.init_method_std / math.sqrt(2.0 * config.num_layers)
    if method == "small_init":
        return math.sqrt(2.0 / (5.0 * config.hidden_size))
    if method == "wang_init":
        return 2.0 / config.num_layers / math.sqrt(config.hidden_size)
    return config.init_method_std


class Linear(nn.Linear):
    """Linear layer, ``x @ weight.T + bias``, with weights drawn from a normal distribution.

    It is a subclass of nn.Linear only because `parallelize_module` requires one.

    Weights are drawn in the constructor because ZeRO-3 partitions a module's parameters when its constructor ends: a
    later initialization would find empty shards.
    """

    cut: ClassVar[int]
    """Sharded dimension of the matrix: 0 outputs, 1 inputs."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        std: float,
        shares: Shares = ALONE,
        bias: bool = True,
        weight: nn.Parameter | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = inputs, outputs
        self.shares = shares
        if weight is None:
            full = torch.empty(outputs, inputs).normal_(0.0, std)
            weight = mark_part(nn.Parameter(shares.part(full, self.cut)), shares)
        self.weight = weight
        self.register_parameter("bias", self._bias(outputs) if bias else None)

    def _bias(self, outputs: int) -> nn.Parameter:
        raise NotImplementedError


class ColumnLinear(Linear):
    """Column-parallel linear layer: a rank has the weights and biases of a part of the outputs."""

    cut = 0

    def _bias(self, outputs: int) -> nn.Parameter:
        return mark_part(nn.Parameter(torch.zeros(outputs // self.shares.ranks)), self.shares)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., inputs) to (..., outputs/t)."""
        return functional.linear(self.shares.copied(x), self.weight, self.bias)


class RowLinear(Linear):
    """Row-parallel linear layer: a rank has the weights of a part of the inputs, and the whole bias, added once."""

    cut = 1

    def _bias(self, outputs: int) -> nn.Parameter:
        return nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., inputs/t) to (..., outputs)."""
        if self.shares.ranks == 1:
            return functional.linear(x, self.weight, self.bias)
        return self.biased(self.shares.summed(self.partial(x)))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's summand, without the bias."""
        return functional.linear(x, self.weight)

    def biased(self, x: torch.Tensor) -> torch.Tensor:
        """Add the bias, if there is one."""
        return x if self.bias is None else x + self.bias


class Embedding(nn.Embedding):
    """Embedding of token ids (b, s) as vectors (b, s, h). A subclass of nn.Embedding for parallelize_module."""

    weight: nn.Parameter

    def __init__(self, config: TrainingConfig, shares: Shares = ALONE) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = config.padded_vocab_size, config.hidden_size
        self.padding_idx = self.max_norm = None
        self.norm_type, self.scale_grad_by_freq, self.sparse = 2.0, False, False
        std = init_std(config.init_method, config)
        full = torch.empty(config.padded_vocab_size, config.hidden_size).normal_(0.0, std)
        self.weight = mark_part(nn.Parameter(shares.part(full, 0)), shares)
        self.dropout = config.hidden_dropout
        self.shares = shares

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (b, s) integers to (b, s, h)."""
        return functional.dropout(self._rows(tokens), self.dropout, self.training)

    def _rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up rows: the rank that has a row contributes it, the others zero."""
        if self.shares.ranks == 1:
            return functional.embedding(tokens, self.weight)
        begin, end = self.shares.range_of(len(self.weight) * self.shares.ranks)
        elsewhere = (tokens < begin) | (tokens >= end)
        embedded = functional.embedding((tokens - begin).masked_fill(elsewhere, 0), self.weight)
        return self.shares.summed(embedded.masked_fill(elsewhere.unsqueeze(-1), 0.0))


@functools.lru_cache(maxsize=8)
def rotary_tables(
    length: int, dims: int, base: float, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines (length, dims) of position times frequency; the second half repeats the first.

    A cached function, not a buffer of the layers, because DDP broadcasts buffers before every forward pass.
    """
    frequency = 1.0 / base ** (torch.arange(0, dims, 2, device=device, dtype=torch.float32) / dims)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: torch.Tensor, dims: int, base: float, first_position: int = 0) -> torch.Tensor:
    """Apply rotary positions (arXiv 2104.09864) to the first ``dims`` of (b, a, s, d), pairing i with i + dims/2."""
    tables = rotary_tables(first_position + x.shape[-2], dims, base, x.device, x.dtype)
    cos, sin = (table[first_position:] for table in tables)
    rotated, rest = x[..., :dims], x[..., dims:]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


class Attention(nn.Module):
    """Causal self-attention with one fused query-key-value projection and rotary positions."""

    def __init__(self, config: TrainingConfig, shares: Shares = ALONE) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.heads, self.head_size = config.num_attention_heads // shares.ranks, config.head_size
        self.rotary_dims, self.rotary_base = config.rotary_dims, config.rotary_emb_base
        self.parts = shares.parts
        self.attend = attention_of(shares.parts)
        self.dropout = config.attention_dropout
        self.query_key_value = ColumnLinear(hidden, 3 * hidden, init_std(config.init_method, config), shares)
        self.dense = RowLinear(hidden, hidden, init_std(config.output_layer_init_method, config), shares)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (b, s, h) to (b, s, h)."""
        out: torch.Tensor = self.dense(self.mixed(x))
        return out

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        """Attend with this rank's heads: (b, s, h), with sequence parallelism (b, s/t, h), to (b, s, h/t)."""
        # (b, s, a, 3d), the layout of GPT-NeoX: each head's query, key and value are adjacent, so that a slice of the
        # projection's rows is a set of complete heads.
        projected = self.query_key_value(x)
        batch, length, _ = projected.shape  # length of the whole sequence, even if x is a part of it
        qkv = projected.view(batch, length, self.heads, 3 * self.head_size).transpose(1, 2)
        query, key, value = qkv.chunk(3, dim=-1)
        start = self.parts.rank * length
        query = rotate(query, self.rotary_dims, self.rotary_base, start)
        key = rotate(key, self.rotary_dims, self.rotary_base, start)
        mixed = self.attend(query, key, value, self.dropout if self.training else 0.0)
        return mixed.transpose(1, 2).reshape(batch, length, self.heads * self.head_size)


class MLP(nn.Module):
    """MLP from h to 4h, gelu, and back."""

    def __init__(self, config: TrainingConfig, shares: Shares = ALONE) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.dense_h_to_4h = ColumnLinear(hidden, 4 * hidden, init_std(config.init_method, config), shares)
        self.dense_4h_to_h = RowLinear(4 * hidden, hidden, init_std(config.output_layer_init_method, config), shares)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (b, s, h) to (b, s, h)."""
        out: torch.Tensor = self.dense_4h_to_h(self.wide(x))
        return out

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """Map (b, s, h) to this rank's part of the inner layer, (b, s, 4h/t)."""
        return functional.gelu(self.dense_h_to_4h(x))


class Block(nn.Module):
    """Transformer layer: attention and MLP, each after a layer norm, sequential or parallel (GPT-J)."""

    def __init__(self, config: TrainingConfig, shares: Shares = ALONE, mlp: nn.Module | None = None) -> None:
        """Create the layer; `mlp` replaces the usual MLP."""
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.attention = Attention(config, shares)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.mlp: nn.Module = MLP(config, shares) if mlp is None else mlp
        self.parallel = config.gpt_j_residual
        self.shares = shares
        self.dropout = config.hidden_dropout

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, self.dropout, self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (b, s, h) to (b, s, h)."""
        if self.parallel and self.shares.ranks > 1:
            return x + self._side_by_side(x)
        attended = x + self._drop(self.attention(self.input_layernorm(x)))
        mlp_input = x if self.parallel else attended
        return attended + self._drop(self.mlp(self.post_attention_layernorm(mlp_input)))

    def _side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        """Compute attention and MLP of GPT-J with one all_reduce of their sum; biases are added after it."""
        attention, mlp = self.attention, self.mlp
        assert isinstance(mlp, MLP)  # experts are not shared
        attended = attention.dense.partial(attention.mixed(self.input_layernorm(x)))
        summand = attended + mlp.dense_4h_to_h.partial(mlp.wide(self.post_attention_layernorm(x)))
        return self._drop(mlp.dense_4h_to_h.biased(attention.dense.biased(self.shares.summed(summand))))


class Head(ColumnLinear):
    """Output layer from (b, s, h) to logits (b, s, V/t), with its own matrix or the embedding's."""

    def __init__(self, config: TrainingConfig, tied: nn.Parameter | None, shares: Shares = ALONE) -> None:
        std = init_std(config.init_method, config)
        super().__init__(config.hidden_size, config.padded_vocab_size, std, shares, bias=False, weight=tied)
