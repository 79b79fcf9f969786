"""Objects in place of what a dry run does not have."""

from __future__ import annotations

from collections.abc import Callable


class Inert:
    """An object whose methods do nothing: a compiled extension, a stream of a device."""

    def __init__(self, *_: object, **__: object) -> None:
        """Take any arguments."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None
