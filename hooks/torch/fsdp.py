"""The hook of PyTorch's FSDP2: the job of `fully_shard`, and the roles of its groups.

Installed when torch.distributed.fsdp is imported. The job is read when the model's forward first runs: only then FSDP
determines the root unit.
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

STATES: Final = "torch.distributed.fsdp._fully_shard._fsdp_state"

_patches = Patches()
_rows: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
_roots = Jobs(lambda root: _rows[root], roles)


def install() -> None:
    """Hook the states that `fully_shard` gives to modules. Does nothing if they are hooked already."""
    if _patches:
        return
    # Not by an import statement: the package around it is still being imported.
    _patches.wrap(sys.modules[STATES].FSDPState, "_lazy_init", _complete)
    _roots.install()


def uninstall() -> None:
    """Restore everything."""
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
