"""Hook for FSDP1, `FullyShardedDataParallel`: why a flat parameter is gathered, and its gradient reduced.

The handle of a flat parameter has a training state, which its prefetching sets as well.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import torch

from commtrace.hooks import purposes
from commtrace.patching import Patches
from commtrace.schema import Purpose

from .group_registry import declared_roles

_PACKAGE: Final = "torch.distributed.fsdp"
_GATHERED_FOR: Final = {"FORWARD": Purpose.PARAMETERS_FORWARD, "BACKWARD_PRE": Purpose.PARAMETERS_BACKWARD}
"""Name of a handle's training state -> why it gathers. In other states, the program has asked for full parameters."""
_REDUCING: Final = ("_reduce_grad", "_reduce_grad_no_shard")

_patches = Patches()


@_patches.installer
def install() -> None:
    """Hook the functions that gather and reduce."""
    # No import statement: the package is still being imported.
    for module in _modules("_runtime_utils", "_unshard_param_utils"):
        _patches.wrap(module, "_unshard", purposes.marking_each(_purpose_of_gathering))
    for module in _modules("_runtime_utils"):
        for name in _REDUCING:
            _patches.wrap(module, name, purposes.marking(Purpose.GRADIENTS))
    for module in _modules("_init_utils"):
        _patches.wrap(module, "_sync_module_params_and_buffers", purposes.marking(Purpose.PARAMETERS_AT_START))
    for module in _modules("fully_sharded_data_parallel"):
        _patches.wrap(module.FullyShardedDataParallel, "clip_grad_norm_", purposes.marking(Purpose.GRADIENT_NORM))


uninstall = _patches.undo


def _modules(*names: str) -> list[Any]:
    """Return modules of the package, without those that this torch does not have."""
    modules = (sys.modules.get(f"{_PACKAGE}.{name}") for name in names)
    return [module for module in modules if module is not None]


def _purpose_of_gathering(state: Any, handle: Any, *_: Any, **__: Any) -> int:
    declared_roles.add(state.process_group, "data", f"{_PACKAGE}.FullyShardedDataParallel")
    purpose = _GATHERED_FOR.get(handle._training_state.name, Purpose.PARAMETERS_ON_REQUEST)
    if purpose is Purpose.PARAMETERS_FORWARD and torch._C._current_graph_task_id() >= 0:
        purpose = Purpose.PARAMETERS_RECOMPUTATION
    return purposes.number(purpose)
