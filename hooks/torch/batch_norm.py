"""Hook for `SyncBatchNorm`: the statistics of a batch that all ranks share, and their gradients."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

from commtrace.hooks.purposes import Marked, number
from commtrace.patching import Patches
from commtrace.schema import Purpose

MODULE: Final = "torch.nn.modules._functions"

_patches = Patches()


@_patches.installer
def install() -> None:
    """Hook both passes of the autograd function."""
    function = getattr(sys.modules[MODULE], "SyncBatchNorm", None)  # no import statement: torch is being imported
    for name in ("forward", "backward") if function is not None else ():
        _patches.replace(function, name, marked)


uninstall = _patches.undo


def marked(original: Any) -> staticmethod[..., Any]:
    """Return a replacement of a method of an autograd function."""
    function: Callable[..., Any] = original.__func__ if isinstance(original, staticmethod) else original

    @functools.wraps(function)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        with Marked(number(Purpose.BATCH_STATISTICS)):
            return function(*args, **kwargs)

    return staticmethod(replacement)
