"""Reversible replacement of attributes of classes and modules of other libraries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeVar, cast

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
_Install = TypeVar("_Install", bound=Callable[..., None])


def around(function: Callable[..., Any]) -> Wrapper:
    """Make a wrapper of a function that is called as `function(original, *args, **kwargs)` in place of the original."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return replacement

    return wrapper


def record_before_call(values: MutableMapping[Any, Any], read: Callable[[Any], Any]) -> Wrapper:
    """Return a wrapper that stores `read(self)` in `values` before it calls the method.

    If `read` raises, because another version of the library lacks what it reads, the entry is removed.
    """

    @around
    def method(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            values[self] = read(self)
        except Exception:
            values.pop(self, None)
        return original(self, *args, **kwargs)

    return method


class Patches:
    """What a hook has replaced or registered, to undo it."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def __bool__(self) -> bool:
        """Return whether anything is replaced or registered."""
        return bool(self._undo)

    def installer(self, install: _Install) -> _Install:
        """Decorate a hook's `install`: it is complete or not there, and a second call does nothing."""

        @functools.wraps(install)
        def complete(*args: Any) -> None:
            if self:
                return
            try:
                install(*args)
            except BaseException:
                self.undo()  # another version of the library may lack a method; half a hook would write a log with gaps
                raise

        return cast(_Install, complete)

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
        original = self.attributes(owner).get(name)
        if original is None:
            return False
        replacement = make(original)
        self.assign(owner, name, replacement)
        self.on_undo(self._restore, owner, name, original, replacement)
        return True

    def include(self, *hooks: Any) -> None:
        """Install other hooks, with `install` and `uninstall`, which are uninstalled with this one."""
        for hook in hooks:
            self.on_undo(hook.uninstall)
            hook.install()

    def append(self, items: list[Any], item: Any) -> None:
        """Append to a list, such as one of listeners."""
        items.append(item)
        self.on_undo(items.remove, item)

    def on_undo(self, function: Callable[..., object], *args: Any) -> None:
        """Call `function(*args)` when everything is undone."""
        self._undo.append(functools.partial(function, *args))

    def undo(self) -> None:
        """Undo everything, latest first, except where another library has replaced an attribute since."""
        while self._undo:
            self._undo.pop()()

    def _restore(self, owner: Any, name: str, original: Any, replacement: Any) -> None:
        if self.attributes(owner).get(name) is replacement:
            self.assign(owner, name, original)

    @staticmethod
    def attributes(owner: Any) -> Mapping[str, Any]:
        """Return what is defined on `owner` itself."""
        namespace: Mapping[str, Any] = vars(owner)
        return namespace

    @staticmethod
    def assign(owner: Any, name: str, value: Any) -> None:
        """Set an attribute."""
        setattr(owner, name, value)
