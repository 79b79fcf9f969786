"""Closed forms of tokens for experts, with numbers computed by hand."""

from __future__ import annotations

from typing import Any, Final

import pytest

from commtrace.schema import Purpose
from commtrace.theory.expert_forms import LayerTokens, RoutedSteps, expert_forms

EXCHANGE: Final = "all_to_all"
# Two passes, in which 10 tokens of 64 bytes were sent, and 14 came.
LAYER: Final = LayerTokens("layers.0", 64, 0, EXCHANGE, 32, 2, (0, 0, 0, 0), (2, 2, 0), 10, 14)
ROW: Final[dict[str, Any]] = {
    "module": "layers.0", "token_bytes": 64, "weight_bytes": 0, "counts_op": EXCHANGE, "counts_bytes": 32, "passes": 2,
    "repeated": [0, 0, 0, 0], "gradients": [2, 2, 0],
}  # fmt: skip


def volumes(layer: LayerTokens) -> dict[tuple[Purpose, str], tuple[int, int]]:
    """Return calls and bytes of each form by purpose and operation."""
    forms = [*expert_forms([layer])]
    assert {(form.role, form.place) for form in forms} == {("expert", layer.module)}
    return {(form.purposes[0], form.op): (form.calls, form.payload_bytes) for form in forms}


FORWARD: Final = {
    (Purpose.EXPERT_COUNTS, EXCHANGE): (2, 64),
    (Purpose.EXPERT_DISPATCH, EXCHANGE): (2, 640),
    (Purpose.EXPERT_COMBINE, EXCHANGE): (2, 896),
}


def test_a_layer_that_trains() -> None:
    assert volumes(LAYER) == {**FORWARD, (Purpose.EXPERT_GRADIENTS, EXCHANGE): (4, 640 + 896)}


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        ((0, 2, 0), (2, 640)),  # nothing before the layer is trained: of the results only, as the tokens were sent
        ((2, 0, 0), (2, 896)),
        ((0, 0, 0), None),
        ((1, 2, 0), None),  # which one of the two passes, and how many tokens it had, is not known
    ],
)
def test_gradients_that_only_some_calls_have(gradients: tuple[int, ...], expected: tuple[int, int] | None) -> None:
    found = volumes(LAYER._replace(gradients=gradients))
    assert found.get((Purpose.EXPERT_GRADIENTS, EXCHANGE)) == expected


@pytest.mark.parametrize(
    ("repeated", "expected"),
    [
        ((2, 2, 2, 0), (6, 64 + 640 + 896)),
        ((2, 2, 0, 0), (4, 64 + 640)),  # a checkpoint that stops early needs no results
        ((4, 4, 0, 0), (8, 128 + 1280)),
    ],
)
def test_repeated_passes(repeated: tuple[int, ...], expected: tuple[int, int]) -> None:
    found = volumes(LAYER._replace(repeated=repeated))
    assert found[Purpose.ACTIVATIONS_RECOMPUTED, EXCHANGE] == expected


def test_a_capacity_that_is_agreed_by_another_operation() -> None:
    found = volumes(LAYER._replace(counts_op="all_reduce", counts_bytes=8, repeated=(2, 2, 2, 0)))
    assert found[Purpose.EXPERT_COUNTS, "all_reduce"] == (2, 16)
    assert found[Purpose.ACTIVATIONS_RECOMPUTED, "all_reduce"] == (2, 16)
    assert found[Purpose.ACTIVATIONS_RECOMPUTED, EXCHANGE] == (4, 640 + 896)


def test_weights_in_a_call_of_their_own() -> None:
    found = volumes(LAYER._replace(weight_bytes=4, gradients=(2, 2, 2)))
    assert found[Purpose.EXPERT_DISPATCH, EXCHANGE] == (4, 640 + 40)
    assert found[Purpose.EXPERT_GRADIENTS, EXCHANGE] == (6, 640 + 896 + 56)


def test_tokens_of_each_step() -> None:
    known: dict[int, Any] = {0: [[7, 10, 14]], 2: [], 5: None}
    routed = RoutedSteps({7: ROW}, [{"step": step, "layers": layers} for step, layers in known.items()])
    assert [routed.at(step) for step in (-1, 0, 1, 2, 4, 5, 9)] == [(), (LAYER,), (LAYER,), (), (), (), ()]
    assert routed.end == 5


@pytest.mark.parametrize("damage", [{7: {**ROW, "passes": "x"}}, {8: ROW}, {7: {"module": "layers.0"}}])
def test_a_damaged_row_has_no_tokens(damage: dict[int, Any]) -> None:
    routed = RoutedSteps(damage, [{"step": 0, "layers": [[7, 10, 14]]}])
    assert routed.at(0) == ()
    assert RoutedSteps({7: ROW}, [{"step": 0, "layers": [[7, 10]]}]).at(0) == ()
    assert RoutedSteps({7: ROW}, [{"step": "x", "layers": [[7, 10, 14]]}]).at(0) == ()
