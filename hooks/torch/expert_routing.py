"""Tokens that layers with experts send in each training step: rows of the tables `experts` and `routing`.

The router determines them, and nothing else in a job does. Their numbers are shapes, which the host has without waiting
for a device: those that the router chose experts for, and those that a rank gets from others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from commtrace.current_step import progress
from commtrace.hooks import purposes
from commtrace.job_row import ExpertLayerRow, RoutingRow
from commtrace.schema import Phase, Purpose

from .recomputation import recomputing
from .step_rows import RowsWrittenAtEnd, StepRows
from .tracer import TorchTracer

_COUNTS, _DISPATCH, _COMBINE, _WEIGHTS = range(4)
"""Calls of a pass: positions in `ExpertLayerRow.repeated`, and, less one, in `ExpertLayerRow.gradients`."""

_SELECTIVE: Final = getattr(torch.utils.checkpoint, "_CachedTorchDispatchMode", ())
"""Mode in which a selective checkpoint repeats a forward pass."""


def marks(kind: Purpose, facts: dict[str, str | int]) -> tuple[int, int]:
    """Return the purposes of a call in a forward pass, and of its gradient's call, by number."""
    if recomputing():
        purpose = purposes.number(Purpose.ACTIVATIONS_RECOMPUTED, **facts, of=kind.value)
    else:
        purpose = purposes.number(kind, **facts)
    return purpose, purposes.number(Purpose.EXPERT_GRADIENTS, **facts, of=kind.value)


def row_bytes(tokens: torch.Tensor) -> int:
    """Return the bytes of a token: of a row of the last dimension."""
    return tokens.element_size() * tokens.shape[-1]


def rows(tokens: torch.Tensor) -> int:
    """Return the number of tokens, also of none."""
    return tokens.shape[:-1].numel()


@dataclass
class _Pass:
    """What a forward pass has sent until its results are combined."""

    token_bytes: int = 0
    weight_bytes: int = 0
    sent: int = 0
    received: int = 0
    gradients: list[int] = field(default_factory=lambda: [0, 0, 0])


@dataclass
class _Layer:
    """What a layer has done in the current step, as in `ExpertLayerRow` and `RoutingRow`."""

    counts_op: str = ""
    counts_bytes: int = 0
    passes: int = 0
    total: _Pass = field(default_factory=_Pass)
    begun: _Pass = field(default_factory=_Pass)
    repeated: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    gradients_of_repeated: list[int] = field(default_factory=lambda: [0, 0, 0])

    def row(self, module: str) -> ExpertLayerRow:
        """Return the row of the table `experts`.

        A repeated pass has gradients in place of the first one (reentrant checkpoints), or in its name.
        """
        return ExpertLayerRow(
            module=module, token_bytes=self.total.token_bytes, weight_bytes=self.total.weight_bytes,
            counts_op=self.counts_op, counts_bytes=self.counts_bytes, passes=self.passes, repeated=[*self.repeated],
            gradients=[*map(max, self.total.gradients, self.gradients_of_repeated)],
        )  # fmt: skip

    def end_pass(self) -> None:
        """Add the pass that has begun to the step. Whatever was sent twice counts once: that is no other pass."""
        total, ended = self.total, self.begun
        self.passes += 1
        total.token_bytes, total.weight_bytes = ended.token_bytes, ended.weight_bytes
        total.sent += ended.sent
        total.received += ended.received
        total.gradients = [*map(int.__add__, total.gradients, ended.gradients)]
        self.begun = _Pass()


class _Routing(StepRows):
    """Layers with experts in the current step."""

    limit = 256  # with a router that learns, each step has a row

    def __init__(self) -> None:
        super().__init__()
        self._layers: dict[str, _Layer] = {}

    def layer(self, module: str) -> _Layer:
        """Return what a layer has done in the current step."""
        self.enter_step()
        return self._layers.setdefault(module, _Layer())

    def facts(self) -> list[Any]:
        """Return the row, and the tokens sent and received, of each layer."""
        return [
            [layer.row(module).to_json(), layer.total.sent, layer.total.received]
            for module, layer in self._layers.items()
            if layer.passes
        ]

    def clear(self) -> None:
        """Begin a step without layers."""
        self._layers = {}

    def write(self, tracer: TorchTracer, step: int, facts: list[Any] | None) -> None:
        """Add a row to the table `routing`, and those that it refers to to `experts`."""
        tables, layers = tracer.recorder.tables, None
        if facts is not None:
            layers = [[tables.row_id("experts", str(row), lambda row=row: row), *tokens] for row, *tokens in facts]  # type: ignore[misc]
        tables.new("routing", RoutingRow(step=step, layers=layers).to_json())


class ExpertRouting:
    """A hook that writes the two tables. Notes belong to the step of the call that was made last."""

    def __init__(self) -> None:
        self._last = RowsWrittenAtEnd()
        self._users = 0

    def install(self) -> None:
        """Write to the tables of this recorder, and of each that starts from now on. Several hooks may install it."""
        if not self._users:
            self._last.install()
        self._users += 1

    def uninstall(self) -> None:
        """Forget everything, once all hooks that have installed it are gone."""
        self._users -= 1
        if not self._users:
            self._last.uninstall()

    def note_counts(self, module: str, op: str, payload: int) -> None:
        """Note a call in which ranks agree on numbers of tokens, with its payload in bytes."""
        layer = self._layer(module)
        if layer is not None and not _is_repeated(layer, _COUNTS):
            layer.counts_op, layer.counts_bytes = op, payload

    def note_dispatch(self, module: str, token_bytes: int, sent: int, received: int, *, has_gradient: bool) -> None:
        """Note that tokens were sent to experts.

        Args:
            module: Name of the layer.
            token_bytes: Bytes of a token.
            sent: Tokens that the router has chosen experts for.
            received: Tokens that came from all ranks.
            has_gradient: Whether the backward pass sends their gradients.
        """
        layer = self._layer(module)
        if layer is not None and not _is_repeated(layer, _DISPATCH, has_gradient=has_gradient):
            layer.begun.token_bytes, layer.begun.sent, layer.begun.received = token_bytes, sent, received

    def note_weights(self, module: str, weight_bytes: int, *, has_gradient: bool) -> None:
        """Note that the weights of the tokens were sent to experts, too, in a call of their own."""
        layer = self._layer(module)
        if layer is not None and not _is_repeated(layer, _WEIGHTS, has_gradient=has_gradient):
            layer.begun.weight_bytes = weight_bytes

    def note_combine(self, module: str, *, has_gradient: bool) -> None:
        """Note that results were sent back, and whether the backward pass sends their gradients."""
        layer = self._layer(module)
        if layer is not None and not _is_repeated(layer, _COMBINE, has_gradient=has_gradient):
            layer.end_pass()

    def _layer(self, module: str) -> _Layer | None:
        """Return a layer of the current step; None if the pass belongs to an evaluation, or to the set-up."""
        if progress.between_steps or progress.marked_phase in (Phase.EVALUATION, Phase.INIT):
            return None
        if not self._last.rows:
            self._last.rows.append(_Routing())
        routing = self._last.rows[0]
        assert isinstance(routing, _Routing)
        return routing.layer(module)


def _is_repeated(layer: _Layer, call: int, *, has_gradient: bool = False) -> bool:
    """Note a call, and its gradient's; return whether it is repeated to recompute activations.

    A selective checkpoint may have kept the result, and not make the call. It is not counted: no form is better than a
    wrong one.
    """
    if not recomputing():
        if call:
            layer.begun.gradients[call - 1] = int(has_gradient)
        return False
    layer.repeated[call] += not any(isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack())
    if call:
        layer.gradients_of_repeated[call - 1] += has_gradient
    return True


expert_routing: Final = ExpertRouting()
