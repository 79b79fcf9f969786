"""Reversible replacement of attributes of classes and modules of other libraries."""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping
from typing import Any

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def record_before_call(values: MutableMapping[Any, Any], read: Callable[[Any], Any]) -> Wrapper:
    """Return a wrapper that stores `read(self)` in `values` before it calls the method.

    If `read` raises, because another version of the library lacks what it reads, the entry is removed.
    """

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                values[self] = read(self)
            except Exception:
                values.pop(self, None)
            return original(self, *args, **kwargs)

        return method

    return wrapper


class Patches:
    """The attributes that a hook replaced, with their originals."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def __bool__(self) -> bool:
        """Return whether anything is replaced."""
        return bool(self._replaced)

    def wrap(self, owner: Any, name: str, wrapper: Wrapper) -> bool:
        """Replace `owner.name` with `wrapper(original)`. Return False if `owner` itself does not define it."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            replacement = functools.wraps(original)(wrapper(original))
            # torch.compile must call the replacement as it is, like the original, and not compile the hook.
            replacement._torchdynamo_disable = True  # type: ignore[attr-defined]
            return replacement

        return self.replace(owner, name, make)

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> bool:
        """Replace `owner.name` with `make(original)`. Return False if `owner` itself does not define it."""
        original = vars(owner).get(name)
        if original is None:
            return False
        replacement = make(original)
        setattr(owner, name, replacement)
        self._replaced.append((owner, name, original, replacement))
        return True

    def undo(self) -> None:
        """Restore the originals, latest first, except where another library has replaced an attribute since."""
        while self._replaced:
            owner, name, original, replacement = self._replaced.pop()
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original)
