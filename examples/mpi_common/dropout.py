"""Dropout whose mask does not depend on how a tensor is divided among ranks.

Whether an element is kept follows from its place in the undivided tensor by a hash (a counter-based generator, as
Salmon et al. 2011, doi:10.1145/2063384.2063405, mean it; the mixing is that of SplitMix64). So every rank makes the
mask of its own share, without communication and without drawing anybody else's numbers, and the shares fit together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

_GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed number
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


@dataclass(frozen=True)
class Place:
    """Where a share lies in the whole: its first row of the batch and first token, and how many tokens a row has."""

    row: int
    token: int
    tokens: int


def dropout(x: torch.Tensor, rate: float, key: int, place: Place) -> torch.Tensor:
    """Of x (batch, sequence, features) zero elements with probability `rate`, and scale the others by 1 / (1 - rate).

    `key` tells this dropout from others: those of other layers and steps.
    """
    if rate == 0.0:
        return x
    return x * (_uniform(x.shape, key, place, x.device) >= rate) * (1.0 / (1.0 - rate))


class Dropout(nn.Module):
    """The same within torch's modules, on undivided tensors, in place of nn.Dropout. Set `key` before each use."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.key = rate, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, features) to the same."""
        return dropout(x, self.rate, self.key, Place(0, 0, x.shape[1]))


def _uniform(shape: torch.Size, key: int, place: Place, device: torch.device) -> torch.Tensor:
    """Numbers (batch, sequence, features) in [0, 1), 24 bits each."""
    batch, sequence, features = shape
    rows = torch.arange(place.row, place.row + batch, device=device).view(-1, 1, 1)
    tokens = torch.arange(place.token, place.token + sequence, device=device).view(1, -1, 1)
    index = (rows * place.tokens + tokens) * features + torch.arange(features, device=device)
    z = (index + _scrambled(key)) * _GOLDEN
    z = (z ^ _shifted(z, 30)) * _MIX[0]
    z = (z ^ _shifted(z, 27)) * _MIX[1]
    z = z ^ _shifted(z, 31)
    return _shifted(z, 40).to(torch.float32) * 2.0**-24


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right: torch's is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _scrambled(key: int) -> int:
    """Far from neighbouring keys, so that their runs of indices do not overlap; below 2**62."""
    return (key * 0x9E3779B97F4A7C15) % 2**62
