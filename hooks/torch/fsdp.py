"""The hook of PyTorch's FSDP2: the job of `fully_shard`, the roles of its groups, and the passes of each step.

Installed when torch.distributed.fsdp is imported. The job is read when the model's forward first runs: only then FSDP
determines the root unit. Passes, which no setting of the job tells, are counted at the root.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, Final

from commtrace.hooks.recorder_setup import fault
from commtrace.patching import Patches

from .captured_jobs import Jobs
from .fsdp_job import describe, roles
from .fsdp_passes import Passes

STATES: Final = "torch.distributed.fsdp._fully_shard._fsdp_state"

_patches = Patches()
_rows: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
_roots = Jobs(lambda root: _rows[root], roles)
_passes = Passes(_roots)


def install() -> None:
    """Hook the states that `fully_shard` gives to modules. Does nothing if they are hooked already."""
    if _patches:
        return
    # Not by an import statement: the package around it is still being imported.
    state = sys.modules[STATES].FSDPState
    _patches.wrap(state, "_lazy_init", _complete)
    _patches.wrap(state, "_register_pre_backward_hook", _passes.forward)
    _patches.wrap(state, "_root_post_backward_final_callback", _passes.backward)
    _roots.install()
    _passes.install()


def uninstall() -> None:
    """Restore everything."""
    _passes.uninstall()
    _roots.uninstall()
    _patches.undo()
    _rows.clear()


def _complete(original: Callable[..., None]) -> Callable[..., None]:
    def _lazy_init(self: Any) -> None:
        known = getattr(self, "_is_root", None) is not None
        original(self)
        if not known:
            try:
                root = self._modules[0]
                _rows[root] = describe(root)  # now, as parameters are replaced while the model runs
                _roots.add(root)
            except Exception:
                fault()

    return _lazy_init
