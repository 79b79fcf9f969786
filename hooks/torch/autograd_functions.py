"""Purposes of autograd functions that communicate: tensor-parallel layers in which a library calls torch itself.

They run for each layer, also where nothing is to be sent, as with one tensor-parallel rank: their code is marked, not
their calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from types import CodeType
from typing import Any, Final

import torch

from commtrace.hooks import purposes
from commtrace.hooks.marked_sources import imported
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
        self._module, self._without = module, without
        self._purposes: Final = {"forward": forward, "backward": backward}
        self._marked: Final[list[CodeType]] = []

    def install(self) -> None:
        """Mark the functions if the module is imported."""
        library = imported(self._module, "")
        if library is None or self._marked:
            return
        for method, purpose in self._purposes.items():
            for code in self._codes(library, method):
                purposes.set_of_code(code, purposes.number(purpose))
                self._marked.append(code)

    def uninstall(self) -> None:
        """Remove the marks."""
        for code in self._marked:
            purposes.set_of_code(code, 0)
        self._marked.clear()

    def _codes(self, library: Any, method: str) -> Iterator[CodeType]:
        for name, function in vars(library).items():
            is_function = isinstance(function, type) and issubclass(function, torch.autograd.Function)
            if is_function and name not in self._without and method in vars(function):
                # Mixed precision and others wrap methods in functions that share their code.
                code = getattr(inspect.unwrap(getattr(function, method)), "__code__", None)
                if code is not None:
                    yield code
