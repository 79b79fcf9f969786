"""Reversible replacement of methods of extension types, whose attributes cannot be set by `setattr`.

CPython looks up methods in a class's own dict, which the class exposes only as a read-only view.
The garbage collector gives access to the dict behind the view. The dict may be changed if the
interpreter's method cache is then invalidated (PyType_Modified, as `setattr` does). The class stays
the same object: all its instances are covered, and `isinstance`, `type`, equality and pickling do
not change.
"""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable
from types import ClassMethodDescriptorType
from typing import Any, cast

from commtrace.patching import Patches, Wrapper


def namespace(cls: type) -> dict[str, Any]:
    """Return the dict behind `vars(cls)`. Raises RuntimeError if this Python does not give access to it."""
    dicts = [referent for referent in gc.get_referents(vars(cls)) if type(referent) is dict]
    if len(dicts) != 1:
        raise RuntimeError(f"the methods of {cls.__name__} cannot be replaced in this Python")
    return cast(dict[str, Any], dicts[0])


class ExtensionPatches(Patches):
    """The attributes of extension types that a hook has replaced; `undo` restores them."""

    @staticmethod
    def attributes(owner: type) -> dict[str, Any]:
        """Return the attributes defined on `owner` itself, as a dict that may be changed."""
        return namespace(owner)

    @staticmethod
    def assign(owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a class."""
        namespace(owner)[name] = value
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))

    def wrap(self, owner: type, name: str, wrapper: Wrapper, instead: Callable[[Any, Any], Any] | None = None) -> bool:
        """Replace a method that is defined on `owner` itself with `wrapper(original)`.

        Args:
            owner: The class.
            name: Name of the method.
            wrapper: Returns the replacement. For a class method, original and replacement take the class first.
            instead: Returns what to install for (original, replacement); None: the replacement.

        Returns:
            False if `owner` defines no such method.
        """

        def make(original: Any) -> Any:
            function, kind = original, None
            if isinstance(original, (classmethod, staticmethod)):
                function, kind = original.__func__, type(original)
            elif isinstance(original, ClassMethodDescriptorType):  # of mpi4py before 4.0; called with the class
                kind = classmethod
            replacement: Any = _copy_metadata(wrapper(function), function)
            if kind is not None:
                replacement = kind(replacement)
            return replacement if instead is None else instead(original, replacement)

        return self.replace(owner, name, make)


def _copy_metadata(replacement: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a replacement the original's name, docstring and signature."""
    functools.update_wrapper(replacement, function)
    signature = getattr(function, "__text_signature__", None)
    if signature is not None:
        replacement.__text_signature__ = signature  # type: ignore[attr-defined]
    return replacement
