"""Hook for torch.distributed.pipelining: the stage and micro-batch of each message.

A stage makes the messages of an action as P2POp objects, and a schedule sends those of several actions in one batch.
The batch reads the tensor of a message just before it sends it, which then marks the call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist

from commtrace.hooks import purposes
from commtrace.hooks.recorder_setup import count_fault
from commtrace.patching import Patches, Wrapper, around
from commtrace.schema import Purpose

_PACKAGE: Final = "torch.distributed.pipelining"
# Method of a stage that makes the messages of a micro-batch, which is its argument -> their purpose.
_MESSAGES: Final = {
    "get_fwd_recv_ops": Purpose.PIPELINE_ACTIVATIONS,
    "get_fwd_send_ops": Purpose.PIPELINE_ACTIVATIONS,
    "get_bwd_recv_ops": Purpose.PIPELINE_GRADIENTS,
    "get_bwd_send_ops": Purpose.PIPELINE_GRADIENTS,
}

_patches = Patches()


@_patches.installer
def install() -> None:
    """Hook the stages and the function that sends a batch."""
    # No import statement: the package is still being imported.
    stage = getattr(sys.modules.get(f"{_PACKAGE}.stage"), "_PipelineStageBase", None)
    for name, purpose in _MESSAGES.items() if stage is not None else ():
        _patches.wrap(stage, name, _marking_messages(purpose))
    _patches.wrap(sys.modules[f"{_PACKAGE}.schedules"], "_batch_p2p", _send_batch)


uninstall = _patches.undo


class _MarkedMessage(dist.P2POp):
    """A message that marks the calling thread when its tensor is read within a batch."""

    commtrace_purpose: int

    @property
    def tensor(self) -> Any:
        if _batches:
            purposes.mark(self.commtrace_purpose)
        return self.__dict__["tensor"]

    @tensor.setter
    def tensor(self, tensor: Any) -> None:
        self.__dict__["tensor"] = tensor


_batches: list[None] = []


def _marking_messages(purpose: Purpose) -> Wrapper:
    @around
    def messages(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        try:
            micro_batch = int(next(iter((*args, *kwargs.values()))))
            for message in made:
                if type(message) is dist.P2POp:
                    message.__class__ = _MarkedMessage
                    vars(message)["commtrace_purpose"] = purposes.number(
                        purpose, stage=int(self.stage_index), micro_batch=micro_batch
                    )
        except Exception:
            count_fault()
        return made

    return messages


@around
def _send_batch(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    _batches.append(None)
    try:
        with purposes.Marked(purposes.current()):  # restores the mark
            return original(*args, **kwargs)
    finally:
        _batches.pop()
