"""What stages of picotron exchange, with a stand-in for its functions, which are called with names and without."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from commtrace.current_step import progress
from commtrace.hooks import purposes
from commtrace.hooks.frameworks import picotron
from commtrace.hooks.torch import marked_batches
from commtrace.schema import Phase, Purpose

ACTIVATIONS = (Purpose.PIPELINE_ACTIVATIONS.value, Phase.FORWARD)
GRADIENTS = (Purpose.PIPELINE_GRADIENTS.value, Phase.BACKWARD)


def now() -> tuple[Any, Any]:
    """Return the purpose and the phase that a call would have."""
    phase = Phase(progress.marked_phase) if progress.marked_phase >= 0 else None
    return purposes.facts(purposes.current()).get("name"), phase


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Yield a stand-in for picotron's module, whose functions return what their messages are marked with."""
    module = ModuleType("picotron.pipeline_parallel.pp_communications")

    def batch_isend_irecv(p2p_op_list: list[str]) -> list[Any]:
        return [now() for _ in p2p_op_list]

    def pipeline_communicate(operation: str, device: str) -> list[Any]:
        return dist.batch_isend_irecv([operation])  # type: ignore[list-item]

    def bidirectional_pipeline_communicate(operation: str, device: str) -> list[Any]:
        return dist.batch_isend_irecv(["send", "recv"])  # type: ignore[list-item]

    monkeypatch.setattr(dist, "batch_isend_irecv", batch_isend_irecv)
    vars(module).update(
        pipeline_communicate=pipeline_communicate, bidirectional_pipeline_communicate=bidirectional_pipeline_communicate
    )
    groups = ModuleType("picotron.process_group_manager")
    vars(groups).update(setup_process_group_manager=lambda: None)
    monkeypatch.setitem(sys.modules, "picotron.process_group_manager", groups)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    progress.reset()
    picotron.install()
    yield module
    picotron.uninstall()
    assert not marked_batches._patches
    progress.reset()


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("recv_forward", ACTIVATIONS),
        ("send_forward", ACTIVATIONS),
        ("recv_backward", GRADIENTS),
        ("send_backward", GRADIENTS),
        ("of another version", (None, None)),
    ],
)
def test_a_message(operation: str, expected: tuple[Any, Any], messages: ModuleType) -> None:
    assert messages.pipeline_communicate(operation, "cpu") == [expected]
    assert messages.pipeline_communicate(device="cpu", operation=operation) == [expected]
    assert now() == (None, None)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [("send_fwd_recv_bwd", [ACTIVATIONS, GRADIENTS]), ("send_bwd_recv_fwd", [GRADIENTS, ACTIVATIONS])],
)
def test_messages_in_both_directions(operation: str, expected: list[Any], messages: ModuleType) -> None:
    assert messages.bidirectional_pipeline_communicate(operation=operation, device="cpu") == expected
    assert messages.bidirectional_pipeline_communicate(operation, "cpu") == expected
    assert now() == (None, None)
