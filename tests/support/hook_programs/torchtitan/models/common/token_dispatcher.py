"""Tokens sent to the ranks of their experts and back, by the function and methods that torchtitan has."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import _functional_collectives

all_to_all_single: Any = _functional_collectives.all_to_all_single
all_to_all_single_autograd: Any = _functional_collectives.all_to_all_single_autograd


class AllToAllTokenDispatcher:
    """Each rank sends all of its tokens but one to the expert on the first of two ranks."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self.sent: list[int] = []
        self.received: list[int] = []

    def dispatch(self, tokens: torch.Tensor) -> torch.Tensor:
        """Send the tokens to their experts."""
        self.sent = [len(tokens) - 1, 1]
        counts: torch.Tensor = all_to_all_single(torch.tensor(self.sent), None, None, self.mesh)
        self.received = counts.tolist()
        dispatched: torch.Tensor = all_to_all_single_autograd(tokens, self.received, self.sent, self.mesh)
        return dispatched

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        """Send the results back."""
        combined: torch.Tensor = all_to_all_single_autograd(results, self.sent, self.received, self.mesh)
        return combined
