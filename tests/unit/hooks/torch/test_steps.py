"""Steps of torch's optimizers: those that train."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch.distributed.checkpoint import state_dict  # noqa: E402

from commtrace.current_step import progress  # noqa: E402
from commtrace.hooks.torch import entry_points, training  # noqa: E402


def test_the_step_that_allocates_state_for_a_checkpoint_is_none() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    entry_points.install()
    training.install()
    try:
        progress.reset()
        loaded = state_dict.get_optimizer_state_dict(model, optimizer)
        assert loaded["state"]
        assert progress.step == -1
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert progress.step == 0
    finally:
        training.uninstall()
        entry_points.uninstall()
