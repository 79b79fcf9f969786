"""Dropout whose mask does not depend on how a tensor is divided among ranks.

A hash of an element's place in the undivided tensor determines whether it is kept (a counter-based generator, Salmon et
al. 2011, doi:10.1145/2063384.2063405, with the mixing of SplitMix64). Every rank computes the mask of its own part
without communication, and the parts fit together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

_GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed number
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


@dataclass(frozen=True)
class Place:
    """Place of a part in the undivided tensor: its first row and first token, and the number of tokens in a row."""

    row: int
    token: int
    tokens: int


def dropout(x: torch.Tensor, rate: float, key: int, place: Place) -> torch.Tensor:
    """Zero elements of x (batch, sequence, features) with probability `rate`; scale the others by 1 / (1 - rate).

    `key` differs for each layer and step.
    """
    if rate == 0.0:
        return x
    return x * (_uniform(x.shape, key, place, x.device) >= rate) * (1.0 / (1.0 - rate))


class Dropout(nn.Module):
    """Replacement of nn.Dropout for undivided tensors. Set `key` before each use."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.key = rate, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply dropout to (batch, sequence, features)."""
        return dropout(x, self.rate, self.key, Place(0, 0, x.shape[1]))


def _uniform(shape: torch.Size, key: int, place: Place, device: torch.device) -> torch.Tensor:
    """Return uniform random numbers (batch, sequence, features) in [0, 1) with 24 bits."""
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
    """Shift right logically; torch shifts arithmetically."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _scrambled(key: int) -> int:
    """Spread keys, so that the index ranges of neighbouring keys do not overlap; below 2**62."""
    return (key * 0x9E3779B97F4A7C15) % 2**62
