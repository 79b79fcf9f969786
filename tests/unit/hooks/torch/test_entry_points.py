"""Functions of torch whose calls have one purpose: marked, and compiled as without the hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad

from commtrace.hooks import purposes
from commtrace.hooks.torch import entry_points
from commtrace.schema import Purpose

ORIGINAL = clip_grad.clip_grad_norm_


@pytest.fixture
def hooked() -> Iterator[None]:
    """Hook the functions."""
    entry_points.install()
    yield
    entry_points.uninstall()
    assert torch.nn.utils.clip_grad_norm_ is clip_grad.clip_grad_norm_ is ORIGINAL


@pytest.mark.usefixtures("hooked")
def test_calls_are_marked() -> None:
    assert torch.nn.utils.clip_grad_norm_ is clip_grad.clip_grad_norm_ is not ORIGINAL
    seen = []

    class Parameters(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            seen.append(purposes.facts(purposes.current()))
            return super().__iter__()

    torch.nn.utils.clip_grad_norm_(Parameters(), 1.0)
    assert seen[0] == {"name": Purpose.GRADIENT_NORM.value}
    assert purposes.current() == 0


@pytest.mark.usefixtures("hooked")
def test_a_program_is_compiled_in_one_graph() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def norm(gradient: torch.Tensor) -> torch.Tensor:
        return torch.nn.utils.get_total_norm([gradient]) * 2

    compiled: Any = torch.compile(norm, backend=backend, fullgraph=True)
    assert compiled(torch.ones(4, 4)) == norm(torch.ones(4, 4)) == 8
    assert len(graphs) == 1
    torch._dynamo.reset()
