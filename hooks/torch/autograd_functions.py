"""Purposes of autograd functions that communicate: tensor-parallel layers in which a library calls torch itself.

They run for each layer, also where nothing is to be sent, as with one tensor-parallel rank: their code is marked, not
their calls.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import torch

from commtrace.hooks import purposes
from commtrace.hooks.marked_sources import imported
from commtrace.patching import Patches
from commtrace.schema import Purpose


class MarkedFunctions:
    """A hook that marks the calls of the autograd functions of a module, where nothing else does."""

    def __init__(self, module: str, forward: Purpose, backward: Purpose, *, without: Collection[str] = ()) -> None:
        """Describe the functions.

        Args:
            module: The module, as imported. Nothing is marked before it is.
            forward: Purpose of the calls of their forward passes.
            backward: Purpose of the calls of their backward passes.
            without: Names of functions that are left out.
        """
        self._module, self._without = module, without
        self._purposes: Final = {"forward": forward, "backward": backward}
        self._patches: Final = Patches()
        self.uninstall: Final = self._patches.undo

    def install(self) -> None:
        """Mark the functions if the module is imported."""
        library = imported(self._module, "")
        for name, function in [] if library is None or self._patches else list(vars(library).items()):
            is_function = isinstance(function, type) and issubclass(function, torch.autograd.Function)
            for method, purpose in self._purposes.items():
                if is_function and name not in self._without and method in vars(function):
                    code = purposes.code_of(getattr(function, method))
                    purposes.mark_code(self._patches, code, purposes.number(purpose))
