"""Tokens sent to the ranks of their experts and back, by the function and methods that torchtitan has."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import _functional_collectives

all_to_all_single: Any = _functional_collectives.all_to_all_single
all_to_all_single_autograd: Any = _functional_collectives.all_to_all_single_autograd


class AllToAllTokenDispatcher:
    """Each of the ranks of a mesh has one expert. The last `dropped` tokens are not sent: a fault."""

    def __init__(self, mesh: Any, dropped: int = 0) -> None:
        self.mesh, self.dropped = mesh, dropped
        self.sent: list[int] = []
        self.received: list[int] = []
        self.order = torch.empty(0)

    def dispatch(self, tokens: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Send tokens, shape (tokens, width), to their experts, numbers of shape (tokens, 1)."""
        self.order = torch.argsort(experts.view(-1), stable=True)[: len(tokens) - self.dropped]
        sent = experts.view(-1)[self.order].bincount(minlength=self.mesh.size())
        self.sent = sent.tolist()
        counts: torch.Tensor = all_to_all_single(sent, None, None, self.mesh)
        self.received = counts.tolist()
        dispatched: torch.Tensor = all_to_all_single_autograd(tokens[self.order], self.received, self.sent, self.mesh)
        return dispatched

    def combine(self, results: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Send the results back. Return the tokens plus their results."""
        combined: torch.Tensor = all_to_all_single_autograd(results, self.sent, self.received, self.mesh)
        return tokens.index_add(0, self.order, combined)
