"""Hook for PyTorch's tensor parallelism: records how `parallelize_module` parallelizes a model.

Installed when torch.distributed.tensor.parallel is imported. A model that uses no other parallelism has no engine
whose construction could be hooked. Its job is captured before the optimizer's first step, unless there is an engine.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from commtrace.hooks.recorder_setup import guard
from commtrace.patching import Patches, around

from . import captured_jobs as jobs
from .captured_jobs import Jobs
from .dtensor_job import describe, parallelized_modules, roles

API: Final = "torch.distributed.tensor.parallel.api"
_PACKAGE: Final = API.rpartition(".")[0]

_patches = Patches()
_tensor_parallel_only = Jobs(lambda root: parallelized_modules.rows[root], roles)


@_patches.installer
def install() -> None:
    """Hook `parallelize_module`."""
    _patches.on_undo(_restore_package)
    # No import statement: the package is still being imported, or has bound the function and needs the patch too.
    for name in (API, _PACKAGE):
        if name in sys.modules:
            _patches.wrap(sys.modules[name], "parallelize_module", _record_style)
    _patches.on_undo(register_optimizer_step_pre_hook(_before_optimizer_step).remove)
    _patches.include(_tensor_parallel_only)
    _patches.on_undo(parallelized_modules.clear)


uninstall = _patches.undo


def _restore_package() -> None:
    """Restore `parallelize_module` in the package if the package imported the replacement."""
    api: Any = sys.modules.get(API)
    package: Any = sys.modules.get(_PACKAGE)
    original = getattr(getattr(package, "parallelize_module", None), "__wrapped__", None)
    if original is not None and original is getattr(api, "parallelize_module", None):
        package.parallelize_module = original


@around
def _record_style(
    original: Any, /, module: Any, device_mesh: Any = None, parallelize_plan: Any = None, **kwargs: Any
) -> Any:
    with parallelized_modules.within(module):
        result = original(module, device_mesh, parallelize_plan, **kwargs)
    with guard():
        parallelized_modules.record_style(module, device_mesh, parallelize_plan, kwargs.get("src_data_rank", 0))
    return result


def _before_optimizer_step(optimizer: Optimizer, *_: Any) -> None:
    """Capture the tensor-parallel model as a job, if no other engine was captured and the styles are new."""
    modules = parallelized_modules
    if torch.compiler.is_compiling() or modules.styles_seen == len(modules.styles) or modules.rows or jobs.any_engine():
        return
    with guard():
        modules.styles_seen = len(modules.styles)
        root = modules.root()
        if root is not None:
            modules.rows[root] = describe(root, optimizer)
            _tensor_parallel_only.add(root)
