"""Replacing methods of classes that forbid it, reversibly: extension types, whose attributes `setattr` refuses to set.

CPython looks methods up in a class's own dict, which the class shows as a read-only view. The dict behind the view can
be had, and may be changed as long as the interpreter is told to forget what it has remembered of the class
(PyType_Modified, which `setattr` calls, too). The class stays the same object: every instance, old or new, whoever
makes it, is covered, and `isinstance`, `type`, equality and pickling are as they were.
"""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable
from typing import Any, cast

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def namespace(cls: type) -> dict[str, Any]:
    """The dict behind `vars(cls)`. Raises RuntimeError where this Python does not give it."""
    found = [each for each in gc.get_referents(vars(cls)) if type(each) is dict]
    if len(found) != 1:
        raise RuntimeError(f"the methods of {cls.__name__} cannot be replaced in this Python")
    return cast(dict[str, Any], found[0])


class ExtensionPatches:
    """What a hook replaced in extension types, so that it can put it back."""

    def __init__(self) -> None:
        self._replaced: list[tuple[type, str, Any, Any]] = []

    def __bool__(self) -> bool:
        """Something is replaced."""
        return bool(self._replaced)

    def wrap(self, owner: type, name: str, wrapper: Wrapper, instead: Callable[[Any, Any], Any] | None = None) -> bool:
        """Replace the method `owner.name`, defined on `owner` itself, by `wrapper(original)`. False if there is none.

        Of a class method, `original` takes the class first, and so must what `wrapper` gives. `instead` may give
        something else for (original, replacement).
        """
        original = namespace(owner).get(name)
        if original is None:
            return False
        if isinstance(original, (classmethod, staticmethod)):
            function: Callable[..., Any] = original.__func__
        else:
            function = original
        replacement: Any = _alike(wrapper(function), function)
        if isinstance(original, staticmethod):
            replacement = staticmethod(replacement)
        elif function is not original:
            replacement = classmethod(replacement)
        if instead is not None:
            replacement = instead(original, replacement)
        self.put(owner, name, replacement)
        return True

    def put(self, owner: type, name: str, replacement: Any) -> None:
        """Replace `owner.name`, defined on `owner` itself."""
        self._replaced.append((owner, name, namespace(owner)[name], replacement))
        _set(owner, name, replacement)

    def undo(self) -> None:
        """Put everything back, latest first, but what somebody else has replaced since."""
        while self._replaced:
            owner, name, original, replacement = self._replaced.pop()
            if namespace(owner).get(name) is replacement:
                _set(owner, name, original)


def _alike(replacement: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """With the original's name, documentation and signature."""
    functools.update_wrapper(replacement, function)
    signature = getattr(function, "__text_signature__", None)
    if signature is not None:
        replacement.__text_signature__ = signature  # type: ignore[attr-defined]
    return replacement


def _set(owner: type, name: str, value: Any) -> None:
    namespace(owner)[name] = value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))
