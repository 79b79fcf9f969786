"""Hook for PyTorch's FSDP2: the job of `fully_shard`, roles of its groups, and passes of each step.

Installed when torch.distributed.fsdp is imported. The job is read when the model's forward first
runs, because FSDP determines the root unit only then. No setting of the job determines the passes:
they are counted at the root.
"""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final

import torch

from commtrace.current_step import progress
from commtrace.hooks import purposes
from commtrace.hooks.recorder_setup import count_fault, guard
from commtrace.job_row import JobRow, PassRow
from commtrace.patching import Patches, around
from commtrace.schema import Phase, Purpose

from . import pipelining
from .captured_jobs import Jobs
from .fsdp_job import describe, groups_below, groups_of, roles
from .passes import ModelPasses, Passes

STATES: Final = "torch.distributed.fsdp._fully_shard._fsdp_state"

_PARAMETER_GROUPS: Final = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_MODULE: Final = "_module_fqn"
_STATE: Final = "_training_state"
"""Attributes of a group: the name of its module, or None; what it does."""
_FORWARD: Final = purposes.NumbersBy(Purpose.PARAMETERS_FORWARD, "module")
_RECOMPUTATION: Final = purposes.NumbersBy(Purpose.PARAMETERS_RECOMPUTATION, "module")
_BACKWARD: Final = purposes.NumbersBy(Purpose.PARAMETERS_BACKWARD, "module")
_GRADIENTS: Final = purposes.NumbersBy(Purpose.GRADIENTS, "module")
_GATHERED_FOR: Final[dict[str, purposes.NumbersBy]] = {"FORWARD": _FORWARD, "PRE_BACKWARD": _BACKWARD}
"""Name of a group's training state -> why it gathers. In others, the program or a pipeline has called `unshard`."""

_SETTINGS: Final = "reduce_grads", "all_reduce_grads", "reshard_after_backward"
_READ_SETTINGS: Final = operator.attrgetter(*_SETTINGS)
_READ_GROUPS: Final = operator.attrgetter("_fsdp_param_groups")

_patches = Patches()
_rows: weakref.WeakKeyDictionary[Any, JobRow] = weakref.WeakKeyDictionary()
_roots = Jobs(lambda root: _rows[root], roles)
_passes = Passes(_roots)
_by_context: dict[int, _Root] = {}
"""Root by the id of the context that all states below it share."""
# Root of a unit, and the unit's number in the job.
_units: weakref.WeakKeyDictionary[Any, tuple[_Root, int]] = weakref.WeakKeyDictionary()
# The group that a root initializes last, and the root. Then it is described: before its first unit is gathered, which
# replaces parameters.
_new_roots: weakref.WeakKeyDictionary[Any, _Root] = weakref.WeakKeyDictionary()


class _Root:
    """A root, and what it has run since its last backward pass."""

    def __init__(self, module: Any, context: Any) -> None:
        """Keep neither the module nor the context of its states in memory."""
        self.forwards = 0
        self._context = key = id(context)
        self._module = weakref.ref(module, lambda _: _by_context.pop(key, None))
        self._passes: ModelPasses | None = None

    def describe(self) -> None:
        """Add the job, and number the units."""
        module = self._module()
        if module is None:
            return
        _rows[module] = describe(module)
        _roots.add(module)
        _by_context[self._context] = self
        for number, group in enumerate(groups_below(module)):
            _units[group] = self, number
            if group.is_unsharded:  # by the program, before the first pass
                _note_unit(group, "unsharded")

    def add(self, entry: PassRow) -> None:
        """Add a pass to the current step, or what the program does with units."""
        if self._passes is not None and self._passes.repeat(entry):
            return
        module = self._module()
        if module is not None:
            self._passes = _passes.add(module, entry)


@_patches.installer
def install() -> None:
    """Hook the states that `fully_shard` attaches to modules."""
    # No import statement: the package is still being imported.
    state = sys.modules[STATES].FSDPState
    _patches.wrap(state, "_init_shared_state", _note_new_root)
    # The first one runs once in each forward, the second one, of older versions, in those of all units.
    if not _patches.wrap(state, "_force_complete_incomplete_states", _end_forward):
        _patches.wrap(state, "_register_pre_backward_hook", _end_forward)
    _patches.wrap(state, "_root_post_backward_final_callback", _end_backward)
    module = sys.modules.get(_PARAMETER_GROUPS)
    group = getattr(module, "FSDPParamGroup", None)
    if group is not None:
        _patches.wrap(group, "lazy_init", _note_last_group)
        _patches.wrap(group, "post_backward", purposes.marking_by(_MODULE, read=_purpose_of_reduction))
        _patches.wrap(group, "_to_sharded", purposes.marking_by(_STATE, read=_note_resharding))
        # Called by `unshard`, which runs several times for each unit and step, and gathers in one of two.
        gathering = purposes.marking_by(_STATE, _MODULE, read=_purpose_of_gathering, of_caller=True)
        _patches.wrap(module, "foreach_all_gather", gathering)
    _patches.include(_roots, _passes)
    _patches.on_undo(_new_roots.clear)
    _patches.on_undo(_rows.clear)
    _patches.on_undo(_by_context.clear)
    _patches.on_undo(_units.clear)


uninstall = _patches.undo


@around
def _note_new_root(original: Callable[..., None], self: Any, /) -> None:
    """Note a root while it initializes itself and its units, before its first pass."""
    original(self)
    with guard():
        groups = _groups(self._state_ctx.all_states)
        if groups:
            _new_roots[groups[-1]] = _Root(self._modules[0], self._state_ctx)


@around
def _note_last_group(original: Callable[..., None], self: Any, /) -> None:
    """Add the root whose last group is initialized."""
    original(self)
    with guard():
        root = _new_roots.pop(self, None)
        if root is not None:
            root.describe()


# The next ones run in each step: `around` would add a function to each.


def _end_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Note the end of a forward: of the root, or of a unit that the program calls itself."""

    def end_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            context = self._state_ctx
            # A forward within a backward pass recomputes activations.
            if context.iter_forward_root is self and torch._C._current_graph_task_id() < 0:
                root = _by_context.get(id(context))
                if root is not None and self._is_root and torch.is_grad_enabled():
                    root.forwards += 1
                elif root is not None:
                    root.add(PassRow(kind="evaluation" if self._is_root else "part", times=1))
        except Exception:
            count_fault()
        return original(self, *args, **kwargs)

    return end_forward


def _end_backward(original: Callable[..., None]) -> Callable[..., None]:
    """Note the end of a backward pass."""

    def root_post_backward_final_callback(self: Any) -> None:
        original(self)
        try:
            if progress.marked_phase != Phase.INIT:
                progress.note_activity()  # passes without a call, as after an evaluation that left parameters gathered
            context = self._state_ctx
            root = _by_context.get(id(context))
            if root is not None:
                forwards, root.forwards = root.forwards, 0
                if forwards == 1:
                    root.add(_training_pass(_settings(context.all_states), bool(context.is_last_backward)))
                else:
                    root.add(PassRow(kind="backward", times=1))
        except Exception:
            count_fault()

    return root_post_backward_final_callback


def _note_unit(group: Any, kind: str) -> None:
    """Note what the program does with a unit outside of a pass, unless its root has had no pass."""
    if group in _units:
        root, number = _units[group]
        root.add(PassRow(kind=kind, times=1, modules=[number]))


def _purpose_of_reduction(group: Any, *_: Any) -> int:
    return _GRADIENTS[group._module_fqn]


def _purpose_of_gathering(group: Any, *_: Any, **__: Any) -> int:
    numbers = _GATHERED_FOR.get(group._training_state._name_)
    if numbers is None:
        return ~purposes.number(_purpose_outside_of_passes(group), module=group._module_fqn or "")
    if numbers is _FORWARD and torch._C._current_graph_task_id() >= 0:
        numbers = _RECOMPUTATION
    return numbers[group._module_fqn]


def _purpose_outside_of_passes(group: Any) -> Purpose:
    """Return why a unit is gathered outside of its passes, and note what the program gathers itself."""
    if pipelining.stepping():
        return Purpose.PARAMETERS_STAGE
    _note_unit(group, "unsharded")
    return Purpose.PARAMETERS_ON_REQUEST


def _note_resharding(group: Any) -> int:
    """Note that parameters are resharded outside of a pass: for a state dict, or by the program. Marks nothing."""
    if group._training_state._name_ != "IDLE":
        return 0
    if not group.is_sharded:
        _note_unit(group, "resharded")
    return ~0


def _groups(states: Sequence[Any]) -> list[Any]:
    """Return the parameter groups of several states."""
    return [group for state in states for group in groups_of(state)]


# Each step needs the next two. They call few functions: what is not in the processor's caches takes far longer.


def _settings(states: Sequence[Any]) -> frozenset[tuple[bool | None, ...]]:
    """Return the settings that the groups of several states have; None in a version of torch without one."""
    try:
        return frozenset(map(_READ_SETTINGS, chain.from_iterable(map(_READ_GROUPS, states))))
    except AttributeError:  # older versions of torch
        return frozenset(tuple(getattr(group, name, None) for name in _SETTINGS) for group in _groups(states))


@functools.lru_cache(maxsize=256)
def _training_pass(settings: frozenset[tuple[bool | None, ...]], is_last_backward: bool) -> PassRow:
    """Return the row of a pass, the same one each time; a setting in which groups differ is None."""
    columns = {name: {of_group[number] for of_group in settings} for number, name in enumerate(_SETTINGS)}
    common: dict[str, Any] = {name: column.pop() if len(column) == 1 else None for name, column in columns.items()}
    return PassRow(kind="training", times=1, **common, is_last_backward=is_last_backward)
