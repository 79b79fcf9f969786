"""The hook of PyTorch's tensor parallelism: how `parallelize_module` divides a model.

Installed when torch.distributed.tensor.parallel is imported. A model that is tensor-parallel only has no engine whose
construction could be hooked: it becomes a job when an optimizer first steps and FSDP, DDP and DeepSpeed have none.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from commtrace.hooks.recorder_setup import fault
from commtrace.patching import Patches, around

from . import captured_jobs as jobs
from .captured_jobs import Jobs
from .dtensor_job import cuts, describe, roles

API: Final = "torch.distributed.tensor.parallel.api"
_PACKAGE: Final = API.rpartition(".")[0]

_patches = Patches()
_tensor_parallel_only = Jobs(lambda root: cuts.rows[root], roles)


@_patches.installer
def install() -> None:
    """Hook `parallelize_module`."""
    _patches.on_undo(_restore_package)
    # Not by an import statement: the package around it is still being imported, or has the function already.
    for name in (API, _PACKAGE):
        if name in sys.modules:
            _patches.wrap(sys.modules[name], "parallelize_module", _noted)
    _patches.on_undo(register_optimizer_step_pre_hook(_stepping).remove)
    _patches.include(_tensor_parallel_only)
    _patches.on_undo(cuts.clear)


uninstall = _patches.undo


def _restore_package() -> None:
    """Restore the function in the package if that had imported the replacement."""
    api: Any = sys.modules.get(API)
    package: Any = sys.modules.get(_PACKAGE)
    original = getattr(getattr(package, "parallelize_module", None), "__wrapped__", None)
    if original is not None and original is getattr(api, "parallelize_module", None):
        package.parallelize_module = original


@around
def _noted(original: Any, /, module: Any, device_mesh: Any = None, parallelize_plan: Any = None, **named: Any) -> Any:
    with cuts.within(module):
        result = original(module, device_mesh, parallelize_plan, **named)
    try:
        cuts.note(module, device_mesh, parallelize_plan, named.get("src_data_rank", 0))
    except Exception:
        fault()
    return result


def _stepping(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or cuts.styles_seen == len(cuts.styles) or cuts.rows or jobs.any_known():
        return
    try:
        cuts.styles_seen = len(cuts.styles)
        root = cuts.root()
        if root is not None:
            cuts.rows[root] = describe(root, optimizer)
            _tensor_parallel_only.add(root)
    except Exception:
        fault()
