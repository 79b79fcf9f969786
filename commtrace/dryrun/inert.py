"""Stand-ins for objects that a dry run does not have."""

from __future__ import annotations

from collections.abc import Callable


class Inert:
    """Stand-in whose methods do nothing, for a compiled extension or a device stream."""

    def __init__(self, *_: object, **__: object) -> None:
        """Take any arguments."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None
