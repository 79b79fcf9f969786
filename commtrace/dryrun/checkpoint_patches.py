"""Patches for torch.distributed.checkpoint in a dry run: each rank is the coordinator of its own files.

The coordinator of a real job gathers the plans of all ranks, joins them, and scatters the results. In a dry run, it
would gather as many copies of its own plan, and reject the checkpoint, whose pieces overlap. The collectives are called
as in a real job. But what a rank uses is what the coordinator would compute from this rank's plan and the empty plans
of the others. Each rank also finishes the checkpoint itself: it can then load its part from its private files.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any, Final

from torch.distributed.checkpoint import default_planner, utils

from commtrace.patching import Patches, around

_patches: Final = Patches()


def install() -> None:
    """Patch the wrapper of collectives of torch.distributed.checkpoint, and the check of the joined plan."""
    _patches.wrap(utils._DistWrapper, "reduce_scatter", _reduce_scatter)
    _patches.wrap(utils._DistWrapper, "all_reduce", _all_reduce)
    _patches.wrap(default_planner, "_validate_global_plan", _validate)


def uninstall() -> None:
    """Restore torch's functions."""
    _patches.undo()


class _Step:
    """A step of a checkpoint: the value that this rank maps to, and what the coordinator makes of it."""

    def __init__(self, wrapper: Any, map_fun: Callable[[], Any], reduce_fun: Callable[[Any], Any]) -> None:
        self._wrapper, self._map, self._reduce = wrapper, map_fun, reduce_fun
        self._own: Any = None

    def map(self) -> Any:
        """Compute the value, and keep it."""
        self._own = self._map()
        return self._own

    def reduce(self, values: Any) -> Any:
        """Reduce the value of this rank and those of the others, which are empty, as the coordinator does.

        Args:
            values: What the coordinator gathered. Not used: copies of this rank's value.
        """
        if not self._wrapper.use_dist:
            return self._reduce(values)
        own = self._wrapper.get_rank()
        return self._reduce(
            [self._own if rank == own else _empty(self._own) for rank in range(self._wrapper.get_world_size())]
        )


@around
def _reduce_scatter(original: Callable[..., Any], self: Any, step: str, map_fun: Any, reduce_fun: Any) -> Any:
    own = _Step(self, map_fun, reduce_fun)
    result = _called(original, self, step, own)
    return result if self.is_coordinator else own.reduce(None)[self.get_rank()]


@around
def _all_reduce(original: Callable[..., Any], self: Any, step: str, map_fun: Any, reduce_fun: Any) -> Any:
    own = _Step(self, map_fun, reduce_fun)
    result = _called(original, self, step, own)
    return result if self.is_coordinator else own.reduce(None)


def _called(original: Callable[..., Any], wrapper: Any, step: str, own: _Step) -> Any:
    """Make the calls of a step. A rank that is not the coordinator does not use what it receives, nor may read it.

    Plans of large models are larger than the messages between simulated ranks: after its last call, such a rank then
    unpickles zeros.
    """
    try:
        return original(wrapper, step, own.map, own.reduce)
    except pickle.UnpicklingError:
        if wrapper.is_coordinator:
            raise
        return None


@around
def _validate(original: Callable[..., Any], plans: Any, metadata: Any) -> Any:
    """Return what the check returns for a valid plan: the pieces of other ranks are not known."""
    return original(plans, dataclasses.replace(metadata, state_dict_metadata={}))


def _empty(value: Any) -> Any:
    """Return an empty plan like another one, or an empty list of results."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return []
    return dataclasses.replace(value, items=[])
