"""Messages between stages, also in batches that serve both directions: phase and purpose of each as torch starts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch.distributed as dist

from commtrace.current_step import progress
from commtrace.hooks import purposes
from commtrace.patching import Patches, around
from commtrace.schema import Phase, Purpose

_PURPOSES: Final = {
    Phase.FORWARD: purposes.number(Purpose.PIPELINE_ACTIVATIONS),
    Phase.BACKWARD: purposes.number(Purpose.PIPELINE_GRADIENTS),
}
"""Purpose of a message between stages by its phase."""

_patches = Patches()
_batch: Sequence[Phase] = ()
"""Phases of the messages, in order, of the batch that is sent."""


@_patches.installer
def install() -> None:
    """Hook the function that sends a batch."""
    _patches.wrap(dist, "batch_isend_irecv", _batch_isend_irecv)


uninstall = _patches.undo


def send(phases: Sequence[Phase], original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function that sends messages of these phases, in this order: of several, in one batch.

    Messages in both directions that are not sent as a batch cannot be distinguished.
    """
    global _batch
    if len({*phases}) < 2:
        with progress.marked(phases[0]), purposes.Marked(_PURPOSES[phases[0]]):
            return original(*args, **kwargs)
    _batch = phases
    try:
        with progress.marked(Phase.OTHER):
            return original(*args, **kwargs)
    finally:
        _batch = ()


class _MarkedOperations(list[Any]):
    """The operations of a batch. Iteration marks phase and purpose of each while torch starts it."""

    def __init__(self, operations: Sequence[Any], phases: Sequence[Phase]) -> None:
        super().__init__(operations)
        self._phases = phases

    def __iter__(self) -> Iterator[Any]:
        for operation, phase in zip(super().__iter__(), self._phases, strict=True):
            with progress.marked(phase), purposes.Marked(_PURPOSES[phase]):
                yield operation


@around
def _batch_isend_irecv(original: Callable[..., Any], /, p2p_op_list: Any) -> Any:
    marks = len(_batch) > 0 and isinstance(p2p_op_list, list) and len(p2p_op_list) == len(_batch)
    return original(_MarkedOperations(p2p_op_list, _batch) if marks else p2p_op_list)
