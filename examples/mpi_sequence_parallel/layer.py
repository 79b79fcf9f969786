"""One Transformer layer on this rank's part of the sequence.

Shapes: b batch, s sequence, h hidden, n ranks. A rank has tokens [r s/n, (r+1) s/n) of every row, and all parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from examples.mpi_common.dropout import Place, dropout
from examples.mpi_common.errors import must_divide
from examples.mpi_common.transports import Transport

from .attention import ATTENTIONS


@dataclass(frozen=True)
class SequenceShape:
    """Sizes of the layer and its input: b, s, h, a heads, and the feed-forward's hidden size f."""

    batch: int
    sequence: int
    hidden: int
    heads: int
    feed_forward: int

    def check(self, ranks: int, attention: str) -> None:
        """Raise ShapeError if `ranks` cannot share this layer."""
        must_divide(self.hidden, "--hidden", self.heads, "--heads", "choose a multiple of the heads")
        must_divide(self.sequence, "--sequence", ranks, "the ranks", "start another number of ranks, or change it")
        if attention == "ulysses":
            fix = "--attention ring and all_gather do not need it"
            must_divide(self.heads, "--heads", ranks, "the ranks", fix)


class Layer(nn.Module):
    """Attention and feed-forward, each after a layer norm, with residuals: (b, s/n, h) to (b, s/n, h).

    nn.TransformerEncoderLayer(norm_first=True, activation="gelu") computes the same, with dropout only on what each
    of the two adds to the residual.
    """

    def __init__(self, shape: SequenceShape, attention: str, rate: float, transport: Transport) -> None:
        super().__init__()
        hidden = shape.hidden
        self.shape, self.rate, self.transport = shape, rate, transport
        self.attention = ATTENTIONS[attention]
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)
        self.linear1 = nn.Linear(hidden, shape.feed_forward)
        self.linear2 = nn.Linear(shape.feed_forward, hidden)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        """Apply the layer; `step` selects the dropout masks."""
        x = x + self._drop(self._attend(self.norm1(x)), 2 * step)
        return x + self._drop(self.linear2(functional.gelu(self.linear1(self.norm2(x)))), 2 * step + 1)

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.query_key_value(x).chunk(3, -1)
        out: torch.Tensor = self.output(self.attention(q, k, v, self.shape.heads, self.transport))
        return out

    def _drop(self, x: torch.Tensor, key: int) -> torch.Tensor:
        place = Place(0, self.transport.rank * x.shape[1], self.shape.sequence)
        return dropout(x, self.rate, key, place)

    def add_up_gradients(self) -> None:
        """Sum the gradients of all ranks' tokens, in one all_reduce for all parameters."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        total = self.transport.all_reduce(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def loss_of(y: torch.Tensor, shape: SequenceShape) -> torch.Tensor:
    """Return this rank's summand of half the mean square of the whole output; the layer's loss is their sum."""
    return y.square().sum() / (2 * shape.batch * shape.sequence * shape.hidden)
