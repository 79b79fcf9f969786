"""Reversible replacement of attributes of classes and modules of other libraries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeVar, cast

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
_Install = TypeVar("_Install", bound=Callable[..., None])


def around(function: Callable[..., Any]) -> Wrapper:
    """Return a wrapper that calls `function(original, *args, **kwargs)` in place of the original."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return replacement

    return wrapper


def record_before_call(values: MutableMapping[Any, Any], read: Callable[[Any], Any]) -> Wrapper:
    """Return a wrapper that stores `read(self)` in `values` before it calls the method.

    If `read` raises (another version of the library may lack the attribute), the entry is removed.
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
    """Replacements and registrations made by a hook, which `undo` reverts."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def __bool__(self) -> bool:
        """Return whether anything is replaced or registered."""
        return bool(self._undo)

    def installer(self, install: _Install) -> _Install:
        """Decorate a hook's `install`: it undoes everything on an error, and does nothing if already installed."""

        @functools.wraps(install)
        def install_once(*args: Any) -> None:
            if self:
                return
            try:
                install(*args)
            except BaseException:
                self.undo()  # another version of the library may lack a method; half a hook would write a log with gaps
                raise

        return cast(_Install, install_once)

    def wrap(self, owner: Any, name: str, wrapper: Wrapper) -> bool:
        """Replace `owner.name` with `wrapper(original)`. Return False if `owner` itself does not define it."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            replacement = functools.wraps(original)(wrapper(original))
            # torch.compile must call the replacement like the original, and must not compile the hook.
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
        """Install other hooks, which have `install` and `uninstall`. `undo` uninstalls them."""
        for hook in hooks:
            self.on_undo(hook.uninstall)
            hook.install()

    def append(self, items: list[Any], item: Any) -> None:
        """Append to a list, such as a list of listeners. `undo` removes the item."""
        items.append(item)
        self.on_undo(items.remove, item)

    def on_undo(self, function: Callable[..., object], *args: Any) -> None:
        """Register `function(*args)` to be called by `undo`."""
        self._undo.append(functools.partial(function, *args))

    def undo(self) -> None:
        """Undo everything, latest first, except attributes that another library has replaced since."""
        while self._undo:
            self._undo.pop()()

    def _restore(self, owner: Any, name: str, original: Any, replacement: Any) -> None:
        if self.attributes(owner).get(name) is replacement:
            self.assign(owner, name, original)

    @staticmethod
    def attributes(owner: Any) -> Mapping[str, Any]:
        """Return the attributes that `owner` itself defines."""
        namespace: Mapping[str, Any] = vars(owner)
        return namespace

    @staticmethod
    def assign(owner: Any, name: str, value: Any) -> None:
        """Set an attribute."""
        setattr(owner, name, value)
