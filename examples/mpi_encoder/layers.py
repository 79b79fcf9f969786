"""The encoder layer of "Attention is all you need" (1706.03762), whole or divided among ranks, and the classifier.

Shapes: b batch, s sequence, m model, f hidden size of the feed-forward, a heads, d = m/a, n ranks. Every rank has the
same activations (b, s, m) between sub-layers, and an n-th of the matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn
from torch.nn import functional

from examples.mpi_common.collectives import add_up, gather, gather_same, share
from examples.mpi_common.dropout import Place, dropout
from examples.mpi_common.errors import must_divide
from examples.mpi_common.transports import Transport

Piece: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Function from a parameter of the whole layer, or its gradient, to a rank's piece of it."""


@dataclass(frozen=True)
class EncoderShape:
    """Sizes of the model and its input."""

    batch: int
    sequence: int
    model: int
    hidden: int
    heads: int
    layers: int
    classes: int
    micro_batches: int

    def check(self, parallel: str, ranks: int) -> None:
        """Raise ShapeError if `ranks` cannot share this model."""
        must_divide(self.model, "--model", self.heads, "the heads", "choose a multiple of --heads")
        must_divide(self.batch, "--batch", self.micro_batches, "the micro-batches", "change --micro-batches")
        if parallel == "pipeline":
            must_divide(self.layers, "--layers", ranks, "the ranks", "all stages need the same number of layers")
            return
        if ranks <= self.heads:
            must_divide(self.heads, "--heads", ranks, "the ranks", "start as many ranks as divide the heads")
        else:
            must_divide(ranks, "the ranks", self.heads, "the heads", "each head needs the same number of ranks")
            must_divide(self.model, "--model", ranks, "the ranks", "each rank needs the same share of a head")
        must_divide(self.hidden, "--hidden", ranks, "the ranks", "change it, or start another number of ranks")


@dataclass(frozen=True)
class Ways:
    """How a layer is divided: the ranks that share it, those that share a head, and whether head outputs are gathered.

    `gathered` is False in Megatron-LM (1909.08053): each rank multiplies its heads' output with its columns of the last
    matrix, and the products are added up. It is True in the original project: heads' outputs are gathered, and each
    rank multiplies them with its rows of the last matrix.
    """

    ranks: Transport
    of_head: Transport
    gathered: bool


class EncoderLayer:
    """Encoder layer divided among ranks: (b, s, m) to (b, s, m).

    It computes what nn.TransformerEncoderLayer does with ReLU, norms after the residuals, and the paper's dropout: on
    the output of each sub-layer and nowhere else.
    """

    def __init__(
        self, whole: nn.TransformerEncoderLayer, index: int, shape: EncoderShape, rate: float, ways: Ways
    ) -> None:
        self.index, self.shape, self.rate, self.ways = index, shape, rate, ways
        self.heads = max(1, shape.heads // ways.ranks.size)
        self.pieces = pieces(ways)
        self.parameters = {
            name: nn.Parameter(self.pieces[name](parameter.detach()).clone())
            for name, parameter in whole.named_parameters()
        }

    def __call__(self, x: torch.Tensor, step: int, row: int) -> torch.Tensor:
        """Apply the layer. `step`, and `row`, the number of x's first row in the batch, select the dropout masks."""
        x = self._norm("norm1", x + self._drop(self._attention(x), step, row, 0))
        return self._norm("norm2", x + self._drop(self._feed_forward(x), step, row, 1))

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        ranks = self.ways.ranks
        qkv = self._linear("self_attn.in_proj_", share(x, ranks))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
        mixed = self._mix(q, k, v).transpose(1, 2).flatten(2)
        if self.ways.gathered:
            return gather_same(self._linear("self_attn.out_proj.", gather(mixed, -1, ranks)), -1, ranks)
        product = functional.linear(mixed, self.parameters["self_attn.out_proj.weight"])
        return add_up(product, ranks) + self.parameters["self_attn.out_proj.bias"]

    def _mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend: (b, a/n, s, d), or (b, 1, s, d a/n) if ranks share a head, whose scores they then add up."""
        if self.ways.of_head.size == 1:
            return functional.scaled_dot_product_attention(q, k, v)
        scores = add_up(q @ k.mT, self.ways.of_head) / math.sqrt(self.shape.model // self.shape.heads)
        # Every rank applies the weights to its own part of the values, so each has a part of the weights' gradient.
        return share(scores.softmax(-1), self.ways.of_head) @ v

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self._linear("linear1.", share(x, self.ways.ranks)).relu()
        product = functional.linear(inner, self.parameters["linear2.weight"])
        return add_up(product, self.ways.ranks) + self.parameters["linear2.bias"]

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.parameters[f"{name}weight"], self.parameters[f"{name}bias"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.parameters[f"{name}.weight"], self.parameters[f"{name}.bias"]
        return functional.layer_norm(x, (self.shape.model,), weight, bias)

    def _drop(self, x: torch.Tensor, step: int, row: int, number: int) -> torch.Tensor:
        return dropout(x, self.rate, dropout_key(step, self.index, number), Place(row, 0, self.shape.sequence))


def pieces(ways: Ways) -> dict[str, Piece]:
    """Return the pieces that a rank has of the parameters of nn.TransformerEncoderLayer."""
    rank, n = ways.ranks.rank, ways.ranks.size

    def whole(x: torch.Tensor) -> torch.Tensor:
        return x

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(n, 0)[rank]

    def columns(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(n, 1)[rank]

    def rows_of_each(x: torch.Tensor) -> torch.Tensor:
        """Return the rows of queries, keys and values, which are stacked."""
        return torch.cat([rows(part) for part in x.chunk(3)])

    return {
        "self_attn.in_proj_weight": rows_of_each,
        "self_attn.in_proj_bias": rows_of_each,
        "self_attn.out_proj.weight": rows if ways.gathered else columns,
        "self_attn.out_proj.bias": rows if ways.gathered else whole,
        "linear1.weight": rows,
        "linear1.bias": rows,
        "linear2.weight": columns,
        **dict.fromkeys(("linear2.bias", "norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"), whole),
    }


def dropout_key(step: int, layer: int, number: int) -> int:
    """Return a different key for each dropout of each step; `number`: 0 after attention, 1 after the feed-forward."""
    return (step << 32) + 2 * layer + number


def whole_layer(shape: EncoderShape, seed: int, index: int) -> nn.TransformerEncoderLayer:
    """Return an undivided layer, the same on every rank, whichever other layers the rank builds."""
    torch.manual_seed((seed << 32) + index)
    return nn.TransformerEncoderLayer(shape.model, shape.heads, shape.hidden, 0.0, "relu", batch_first=True)


def classifier(shape: EncoderShape, seed: int) -> nn.Linear:
    """Return the classifier from (b, s, m) to logits (b, s, classes)."""
    torch.manual_seed((seed << 32) + shape.layers)
    return nn.Linear(shape.model, shape.classes)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of logits (b, s, classes) against labels (b, s)."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def update(parameters: Iterable[nn.Parameter], rate: float) -> None:
    """Update parameters by SGD. torch.optim.SGD would first import torch's compiler, which takes seconds."""
    with torch.no_grad():
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=rate)
