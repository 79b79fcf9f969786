"""Rows of the tables `experts` and `routing`; tests of real programs compare them with the calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from commtrace.current_step import progress
from commtrace.hooks.torch import expert_routing, recomputation
from commtrace.hooks.torch import tracer as torch_tracer
from commtrace.hooks.torch.expert_routing import ExpertRouting
from commtrace.schema import Phase


class Tables:
    """Rows that are written, with the rows of layers in place of their ids."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Any]] = []
        self.routing: list[tuple[int, Any]] = []

    def row_id(self, table: str, key: str, row: Callable[[], dict[str, Any]]) -> int:
        assert table == "experts"
        if row() not in self.layers:
            self.layers.append(row())
        return self.layers.index(row())

    def new(self, table: str, row: dict[str, Any]) -> None:
        assert table == "routing"
        layers = row["layers"]
        self.routing.append((row["step"], layers and [(self.layers[id_], *tokens) for id_, *tokens in layers]))


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tables]:
    written = Tables()
    tracer = SimpleNamespace(recorder=SimpleNamespace(tables=written))
    monkeypatch.setattr(torch_tracer, "current", lambda: tracer)
    progress.reset()
    recomputation.install()
    yield written
    recomputation.uninstall()
    progress.reset()


def forward(routing: ExpertRouting, sent: int, received: int, *, has_gradient: bool = True) -> None:
    """Note the calls of a pass."""
    routing.note_counts("moe", "all_to_all", 16)
    routing.note_dispatch("moe", 32, sent, received, has_gradient=has_gradient)
    routing.note_combine("moe", has_gradient=has_gradient)


def repeat(function: Callable[[], None]) -> None:
    """Call a function where a checkpoint repeats a forward pass."""
    passes = iter((lambda: None, function))

    def run(values: torch.Tensor) -> torch.Tensor:
        next(passes)()
        return values.clone()

    result: Any = checkpoint(run, torch.ones(1, requires_grad=True), use_reentrant=True)
    result.backward()


def end(routing: ExpertRouting) -> None:
    tracer = torch_tracer.current()
    assert tracer is not None
    for rows in routing._last.rows:
        rows.end(tracer)


def tokens(written: Tables) -> list[tuple[int, list[tuple[int, int, int]]]]:
    """Return passes, and tokens sent and received, by step."""
    return [
        (step, [(layer["passes"], sent, received) for layer, sent, received in layers])
        for step, layers in written.routing
    ]


def test_a_row_is_written_where_tokens_change(tables: Tables) -> None:
    routing = ExpertRouting()
    for received in (6, 6, 7):
        progress.note_activity()
        forward(routing, 4, received)
        forward(routing, 4, 1)
        progress.finish_step()
    end(routing)
    assert tokens(tables) == [(0, [(2, 8, 7)]), (2, [(2, 8, 8)])]
    (layer,) = tables.layers
    assert layer == {
        "module": "moe", "token_bytes": 32, "weight_bytes": 0, "counts_op": "all_to_all", "counts_bytes": 16,
        "passes": 2, "repeated": [0, 0, 0, 0], "gradients": [2, 2, 0],
    }  # fmt: skip


def test_evaluations_and_the_set_up_are_left_out(tables: Tables) -> None:
    routing = ExpertRouting()
    forward(routing, 4, 4)  # before the first step
    progress.note_activity()
    forward(routing, 5, 5)
    for phase in (Phase.EVALUATION, Phase.INIT):
        with progress.marked(phase):
            forward(routing, 6, 6)
    progress.finish_step()
    forward(routing, 7, 7)  # between two steps
    end(routing)
    assert tokens(tables) == [(0, [(1, 5, 5)])]


def test_tokens_that_are_sent_twice_count_once(tables: Tables) -> None:
    routing = ExpertRouting()
    progress.note_activity()
    routing.note_dispatch("moe", 32, 4, 6, has_gradient=True)
    routing.note_weights("moe", 4, has_gradient=True)
    forward(routing, 4, 6)
    end(routing)
    assert tokens(tables)[0] == (0, [(1, 4, 6)])
    assert tables.layers[0]["weight_bytes"] == 4
    assert tables.layers[0]["gradients"] == [1, 1, 1]


def test_repeated_passes_have_the_gradients_of_the_first_ones(tables: Tables) -> None:
    """A reentrant checkpoint computes no gradients in the first pass, and another one in both."""
    routing = ExpertRouting()
    for first in (False, True):
        progress.note_activity()
        forward(routing, 4, 6, has_gradient=first)
        repeat(lambda: forward(routing, 4, 6))
        progress.finish_step()
    end(routing)
    assert tokens(tables) == [(0, [(1, 4, 6)])]
    (layer,) = tables.layers
    assert (layer["repeated"], layer["gradients"]) == ([1, 1, 1, 0], [1, 1, 0])


def test_a_selective_checkpoint_may_make_no_call_again(tables: Tables) -> None:
    routing = ExpertRouting()
    progress.note_activity()
    _, repeating = create_selective_checkpoint_contexts([torch.ops.aten.mm.default])
    forward(routing, 4, 6)

    def repeated() -> None:
        with repeating:
            forward(routing, 4, 6)

    repeat(repeated)
    end(routing)
    assert tables.layers[0]["repeated"] == [0, 0, 0, 0]
    assert tables.layers[0]["gradients"] == [1, 1, 0]


def test_tokens_are_unknown_from_the_last_row_on(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_routing._Routing, "limit", 3)
    routing = ExpertRouting()
    for received in range(1, 6):
        progress.note_activity()
        forward(routing, 4, received)
        progress.finish_step()
    end(routing)
    assert [step for step, _ in tables.routing] == [0, 1, 2]
    assert tables.routing[-1] == (2, None)
