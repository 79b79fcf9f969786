"""Purposes of autograd functions that communicate: tensor-parallel layers in which a library calls torch itself."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any, Final

import torch

from commtrace.hooks import purposes
from commtrace.hooks.marked_sources import imported
from commtrace.patching import Patches
from commtrace.schema import Purpose


class MarkedFunctions:
    """A hook that marks the calls of the autograd functions of a module, where no other mark says more."""

    def __init__(self, module: str, forward: Purpose, backward: Purpose, *, without: Collection[str] = ()) -> None:
        """Describe the functions.

        Args:
            module: The module, as imported. Nothing is marked before it is.
            forward: Purpose of the calls of their forward passes.
            backward: Purpose of the calls of their backward passes.
            without: Names of functions that are left out.
        """
        self._module, self._forward, self._backward, self._without = module, forward, backward, without
        self._patches: Final = Patches()
        self.uninstall: Final = self._patches.undo

    def install(self) -> None:
        """Mark the functions if the module is imported."""
        library = imported(self._module, "")
        for name, function in [] if library is None or self._patches else list(vars(library).items()):
            is_function = isinstance(function, type) and issubclass(function, torch.autograd.Function)
            if is_function and name not in self._without:
                self._patches.replace(function, "forward", functools.partial(_marked, self._forward))
                self._patches.replace(function, "backward", functools.partial(_marked, self._backward))


def _marked(purpose: Purpose, original: Any) -> Any:
    """Return a replacement of the `forward` or `backward` of an autograd function."""
    recomputed = Purpose.ACTIVATIONS_RECOMPUTED if purpose is Purpose.ACTIVATIONS else purpose
    function = original.__func__ if isinstance(original, staticmethod) else original
    marked = functools.wraps(function)(purposes.marking_unclaimed(purpose, recomputed)(function))
    return staticmethod(marked) if isinstance(original, staticmethod) else marked
