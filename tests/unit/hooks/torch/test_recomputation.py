"""Repeated forward passes of `torch.utils.checkpoint`, in the version of torch that is installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.checkpoint import checkpoint

from commtrace.hooks.torch import recomputation


@pytest.fixture(autouse=True)
def hooked() -> Iterator[None]:
    recomputation.install()
    yield
    recomputation.uninstall()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_only_what_a_checkpoint_repeats_is_recomputation(use_reentrant: bool) -> None:
    seen: list[bool] = []

    def function(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(recomputation.recomputing())
        return tensor.sin().cos()

    tensor = torch.ones(2, requires_grad=True)
    checkpoint(function, tensor, use_reentrant=use_reentrant).sum().backward()
    function(tensor).sum().backward()
    assert seen == [False, True, False]
