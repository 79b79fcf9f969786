"""Hook for `torch.utils.checkpoint`: calls of a forward pass that is repeated in a backward pass."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

from commtrace.hooks.purposes import recomputed
from commtrace.patching import Patches, around

MODULE: Final = "torch.utils.checkpoint"

_patches = Patches()


@_patches.installer
def install() -> None:
    """Hook both implementations, `use_reentrant` or not."""
    checkpoint = sys.modules[MODULE]  # no import statement: torch is still being imported
    if hasattr(checkpoint, "_CheckpointFrame"):
        _patches.wrap(checkpoint._CheckpointFrame, "__init__", _make_frame)
    if hasattr(checkpoint, "CheckpointFunction"):
        _patches.replace(checkpoint.CheckpointFunction, "forward", reentrant_forward)


uninstall = _patches.undo


@around
def _make_frame(original: Callable[..., None], self: Any, /, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    self.recompute_fn = recomputed(self.recompute_fn)


def reentrant_forward(original: Any) -> staticmethod[..., Any]:
    """Return a replacement of the `forward` of an autograd function that keeps `run_function` to repeat it."""

    @functools.wraps(original)
    def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        result = original.__func__(ctx, run_function, *args)
        ctx.run_function = recomputed(run_function)
        return result

    return staticmethod(forward)
