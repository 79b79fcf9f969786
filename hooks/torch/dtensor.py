"""The hook of PyTorch's tensor parallelism: how `parallelize_module` divides a model.

Installed when torch.distributed.tensor.parallel is imported. A model that is tensor-parallel only has no engine whose
construction could be hooked: it becomes a job when an optimizer first steps and FSDP, DDP and DeepSpeed have none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from commtrace.hooks.recorder_setup import fault
from commtrace.patching import Patches

from . import captured_jobs as jobs
from .captured_jobs import Jobs
from .dtensor_job import cuts, describe, roles

API: Final = "torch.distributed.tensor.parallel.api"
_PACKAGE: Final = API.rpartition(".")[0]

_patches = Patches()
_tensor_parallel_only = Jobs(lambda root: cuts.rows[root], roles)
_handles: list[Any] = []


def install() -> None:
    """Hook `parallelize_module`. Does nothing if it is hooked already."""
    if _patches:
        return
    # Not by an import statement: the package around it is still being imported, or has the function already.
    for name in (API, _PACKAGE):
        if name in sys.modules:
            _patches.wrap(sys.modules[name], "parallelize_module", _noted)
    _handles.append(register_optimizer_step_pre_hook(_stepping))
    _tensor_parallel_only.install()


def uninstall() -> None:
    """Restore everything."""
    _tensor_parallel_only.uninstall()
    _patches.undo()
    api: Any = sys.modules.get(API)
    package: Any = sys.modules.get(_PACKAGE)
    original = getattr(getattr(package, "parallelize_module", None), "__wrapped__", None)
    if original is not None and original is getattr(api, "parallelize_module", None):
        package.parallelize_module = original  # the package had imported the replacement
    while _handles:
        _handles.pop().remove()
    cuts.clear()


def _noted(original: Callable[..., Any]) -> Callable[..., Any]:
    def parallelize_module(module: Any, device_mesh: Any = None, parallelize_plan: Any = None, **named: Any) -> Any:
        with cuts.within(module):
            result = original(module, device_mesh, parallelize_plan, **named)
        try:
            cuts.note(module, device_mesh, parallelize_plan, named.get("src_data_rank", 0))
        except Exception:
            fault()
        return result

    return parallelize_module


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
