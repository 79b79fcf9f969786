"""Replacing attributes of other people's classes, reversibly."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


class Patches:
    """What a hook replaced, so that it can put it back."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def __bool__(self) -> bool:
        """Something is replaced."""
        return bool(self._replaced)

    def wrap(self, owner: Any, name: str, wrapper: Wrapper) -> bool:
        """Replace `owner.name`, defined on `owner` itself, by `wrapper(original)`. False where there is none."""
        original = vars(owner).get(name)
        if original is None:
            return False
        replacement = functools.wraps(original)(wrapper(original))
        # torch.compile must call it as it is, and not compile what a hook does; as with the method that it replaces.
        replacement._torchdynamo_disable = True  # type: ignore[attr-defined]
        setattr(owner, name, replacement)
        self._replaced.append((owner, name, original, replacement))
        return True

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> bool:
        """As `wrap`, by something that cannot carry the original's attributes."""
        original = vars(owner).get(name)
        if original is None:
            return False
        replacement = make(original)
        setattr(owner, name, replacement)
        self._replaced.append((owner, name, original, replacement))
        return True

    def undo(self) -> None:
        """Put everything back, latest first, but what somebody else has replaced since."""
        while self._replaced:
            owner, name, original, replacement = self._replaced.pop()
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original)
