"""A hook made of tables: the functions and methods of a library that communicate for one reason."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol

from commtrace.current_step import progress
from commtrace.patching import Patches, Wrapper, around
from commtrace.schema import Phase, Purpose

from . import purposes
from .purposes import marking


class Source(NamedTuple):
    """Functions or methods with a purpose. Those that a version of the library does not have are left out."""

    module: str
    """The module, as imported. Nothing is marked before it is."""
    owner: str
    """A class of the module; "": names of the module itself, also of functions that it has imported."""
    purposes: Mapping[str, Purpose]
    wrapper: Callable[[Purpose], Wrapper] = marking
    """Makes the wrapper of a function from its purpose."""


class MarkedSources:
    """A hook that marks the calls of the functions in a table. Modules may be imported one after another."""

    def __init__(self, *sources: Source) -> None:
        self._sources: Final = sources
        self._patches: Final = [Patches() for _ in self._sources]

    def install(self) -> None:
        """Mark the functions of the modules that are imported."""
        for source, patches in zip(self._sources, self._patches, strict=True):
            owner = imported(source.module, source.owner)
            if owner is not None and not patches:
                for name, purpose in source.purposes.items():
                    _mark(patches, owner, name, source.wrapper(purpose))

    def uninstall(self) -> None:
        """Restore everything."""
        for patches in self._patches:
            patches.undo()


class Hook(Protocol):
    """A hook that marks calls of modules that are imported one after another."""

    def install(self) -> None:
        """Mark the functions of the modules that are imported."""

    def uninstall(self) -> None:
        """Restore everything."""


class Hooks:
    """A hook made of several."""

    def __init__(self, *hooks: Hook) -> None:
        self._hooks: Final = hooks

    def install(self) -> None:
        """Mark the functions of the modules that are imported."""
        for hook in self._hooks:
            hook.install()

    def uninstall(self) -> None:
        """Restore everything."""
        for hook in self._hooks:
            hook.uninstall()


def imported(module: str, name: str) -> Any:
    """Return a class, or the module for ""; None if it is not imported."""
    return getattr(sys.modules.get(module), name, None) if name else sys.modules.get(module)


def _mark(patches: Patches, owner: Any, name: str, wrapper: Wrapper) -> None:
    """Replace a function, or a method of any kind. A generator is left out: it runs after its call."""
    original = vars(owner).get(name)
    if isinstance(original, classmethod | staticmethod):
        kind, function = type(original), original.__func__
        patches.replace(owner, name, lambda _: kind(functools.wraps(function)(wrapper(function))))
    elif callable(original) and not isinstance(original, type) and not inspect.isgeneratorfunction(original):
        patches.wrap(owner, name, wrapper)


def evaluating(purpose: Purpose) -> Wrapper:
    """Return a wrapper that marks the calls of an evaluation, which belong to no training step."""
    marked = purposes.number(purpose)

    @around
    def function(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with purposes.Marked(marked), progress.marked(Phase.EVALUATION):
            return original(*args, **kwargs)

    return function
