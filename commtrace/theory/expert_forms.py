"""Closed forms of the tokens that layers with experts send: dispatch and combine, forward, backward and recomputed.

    dispatch    tokens of the rank, each once for each of its experts, x bytes of a token
    combine     tokens that the rank's own experts compute x bytes of a token
    backward    the gradient of combine as dispatch, the gradient of dispatch as combine
    repeated    to recompute activations: as in the first forward pass
    weights     as dispatch, with the bytes of a weight, where a call of their own sends them (Megatron-Core)

They are the four all_to_alls of a layer (Rajbhandari et al., arXiv 2201.05596), with the tokens as the router has sent
them (table `routing` of the log) in place of an even distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from commtrace.job_row import ExpertLayerRow, RoutingRow
from commtrace.schema import Purpose

from .job import NotPredictedError, reading_job
from .purpose_forms import PurposeForm

_ROLE: Final = "expert"
_EXCHANGE: Final = "all_to_all"
_COUNTS: Final = "numbers of tokens, once in each pass"
_DISPATCHED: Final = "tokens x experts of a token, as the router chose, x bytes of a token"
_COMBINED: Final = "tokens that this rank's experts compute x bytes of a token"
_GRADIENTS: Final = "as dispatched and combined in forward"
_REPEATED: Final = "as in the forward pass that is repeated"


class LayerTokens(NamedTuple):
    """What a layer with experts sends in a step, as `ExpertLayerRow` and `RoutingRow` describe it."""

    module: str
    token_bytes: int
    weight_bytes: int
    counts_op: str
    counts_bytes: int
    passes: int
    repeated: tuple[int, ...]
    gradients: tuple[int, ...]
    sent: int
    received: int


Routing = tuple[LayerTokens, ...]
"""The layers with experts of a rank, in a step."""


class RoutedSteps:
    """The tokens for experts in each step of a process.

    Args:
        experts: Rows of the log's table `experts`, by id.
        routing: Rows of its table `routing`.
    """

    def __init__(self, experts: Mapping[int, Mapping[str, Any]], routing: Sequence[Mapping[str, Any]]) -> None:
        self._by_step: dict[int, Routing] = {}
        self.end: int | None = None
        """First step of which the tokens are not known; None: there is none."""
        with suppress(NotPredictedError), reading_job():  # a log that is damaged has no tokens from there on
            self._read(experts, routing)

    def _read(self, experts: Mapping[int, Mapping[str, Any]], routing: Sequence[Mapping[str, Any]]) -> None:
        for row in map(RoutingRow.read, routing):
            if row.layers is None:
                self.end = row.step
                return
            layers = [(ExpertLayerRow.read(experts[number]), sent, received) for number, sent, received in row.layers]
            self._by_step[row.step] = tuple(
                LayerTokens(
                    layer.module, layer.token_bytes, layer.weight_bytes, layer.counts_op, layer.counts_bytes,
                    layer.passes, tuple(layer.repeated), tuple(layer.gradients), sent, received,
                )
                for layer, sent, received in layers
            )  # fmt: skip

    def at(self, step: int) -> Routing:
        """Return the layers in a step; none if the step is not known."""
        if self.end is not None and step >= self.end:
            return ()
        known = [number for number in self._by_step if number <= step]
        return self._by_step[max(known)] if known else ()


def expert_forms(layers: Iterable[LayerTokens]) -> Iterator[PurposeForm]:
    """Yield the closed forms of the calls of layers with experts, each with the layer's module as its place."""
    for layer in layers:
        dispatched, combined = layer.sent * layer.token_bytes, layer.received * layer.token_bytes
        weights, weights_back = layer.sent * layer.weight_bytes, layer.received * layer.weight_bytes
        passes, counts = layer.passes, layer.passes * layer.counts_bytes
        calls = 2 * passes if layer.weight_bytes else passes
        yield _form(Purpose.EXPERT_DISPATCH, _EXCHANGE, layer, calls, dispatched + weights, _DISPATCHED)
        yield _form(Purpose.EXPERT_COMBINE, _EXCHANGE, layer, passes, combined, _COMBINED)
        if counts:
            yield _form(Purpose.EXPERT_COUNTS, layer.counts_op, layer, passes, counts, _COUNTS)
        # The gradient of the dispatched tokens is sent by the ranks that got them.
        gradients = [*zip(layer.gradients, (combined, dispatched, weights_back), strict=True)]
        yield from _repeated(Purpose.EXPERT_GRADIENTS, _EXCHANGE, layer, gradients, _GRADIENTS)
        numbers, *tokens = zip(layer.repeated, (counts, dispatched, combined, weights), strict=True)
        by_op: dict[str, list[tuple[int, int]]] = {_EXCHANGE: tokens}
        by_op.setdefault(layer.counts_op or _EXCHANGE, []).append(numbers)
        for op, repeated in by_op.items():
            yield from _repeated(Purpose.ACTIVATIONS_RECOMPUTED, op, layer, repeated, _REPEATED)


def _repeated(
    purpose: Purpose, op: str, layer: LayerTokens, calls: Sequence[tuple[int, int]], formula: str
) -> Iterator[PurposeForm]:
    """Yield the form of calls, of which there is one kind in each of so many passes, with the bytes of all passes.

    Bytes of a part of the passes are not known, because passes differ.
    """
    if any(number % layer.passes for number, _ in calls if layer.passes):
        return
    number = sum(number for number, _ in calls)
    if number:
        size = sum(size * number // layer.passes for number, size in calls)
        yield _form(purpose, op, layer, number, size, formula)


def _form(purpose: Purpose, op: str, layer: LayerTokens, calls: int, size: int, formula: str) -> PurposeForm:
    return PurposeForm((purpose,), _ROLE, op, layer.module, calls, size, formula)
