"""Reversible replacement of methods of extension types, whose attributes `setattr` refuses to set.

CPython looks up methods in a class's own dict, of which the class shows a read-only view. The garbage collector gives
the dict behind the view. It may be changed if the interpreter's method cache is invalidated (PyType_Modified, as
`setattr` does). The class stays the same object: all its instances are covered, and `isinstance`, `type`, equality and
pickling do not change.
"""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable
from typing import Any, cast

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def namespace(cls: type) -> dict[str, Any]:
    """Return the dict behind `vars(cls)`. Raises RuntimeError if this Python does not give access to it."""
    dicts = [each for each in gc.get_referents(vars(cls)) if type(each) is dict]
    if len(dicts) != 1:
        raise RuntimeError(f"the methods of {cls.__name__} cannot be replaced in this Python")
    return cast(dict[str, Any], dicts[0])


class ExtensionPatches:
    """What a hook has replaced in extension types, to restore it."""

    def __init__(self) -> None:
        """Replace nothing yet."""
        self._replaced: list[tuple[type, str, Any, Any]] = []

    def __bool__(self) -> bool:
        """Return whether anything is replaced."""
        return bool(self._replaced)

    def wrap(self, owner: type, name: str, wrapper: Wrapper, instead: Callable[[Any, Any], Any] | None = None) -> bool:
        """Replace a method that is defined on `owner` itself by `wrapper(original)`.

        Args:
            owner: The class.
            name: Name of the method.
            wrapper: Returns the replacement. The original of a class method takes the class first, so must its result.
            instead: Returns what to install for (original, replacement); None: the replacement.

        Returns:
            False if `owner` defines no such method.
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
        """Restore everything, latest first, except what somebody else has replaced since."""
        while self._replaced:
            owner, name, original, replacement = self._replaced.pop()
            if namespace(owner).get(name) is replacement:
                _set(owner, name, original)


def _alike(replacement: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a replacement the original's name, documentation and signature."""
    functools.update_wrapper(replacement, function)
    signature = getattr(function, "__text_signature__", None)
    if signature is not None:
        replacement.__text_signature__ = signature  # type: ignore[attr-defined]
    return replacement


def _set(owner: type, name: str, value: Any) -> None:
    namespace(owner)[name] = value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))
