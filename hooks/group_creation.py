"""Times that libraries took to create process groups and communicators, most of them before recording begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

from commtrace.patching import Wrapper, around


class GroupCreations:
    """The groups that this process has created with one library, and the time of each until it is freed."""

    def __init__(self) -> None:
        self._ns: dict[Hashable, int] = {}
        self._created = self._total_ns = 0

    def timed(self, key_of: Callable[[Any], Hashable | None]) -> Wrapper:
        """Return a wrapper of a function that creates a group.

        Args:
            key_of: Returns what identifies the group in the function's result; None if this process is no member.
        """

        @around
        def create(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            begin = time.monotonic_ns()
            result = original(*args, **kwargs)
            ns = time.monotonic_ns() - begin
            try:
                if (key := key_of(result)) is not None:
                    self._ns[key] = ns
                    self._created += 1
                    self._total_ns += ns
            except Exception:
                pass  # another version of the library returns another result: the time is not known
            return result

        return create

    def time_of(self, key: Hashable) -> int | None:
        """Return the time in ns that a group took; None if it is not known."""
        return self._ns.get(key)

    def forget(self, key: Hashable) -> None:
        """Forget a group whose key another one may get."""
        self._ns.pop(key, None)

    def facts(self) -> dict[str, int]:
        """Return the number of groups that were created, and the sum of their times, as columns of `setup`."""
        return {"groups_created": self._created, "groups_create_ns": self._total_ns} if self._created else {}
