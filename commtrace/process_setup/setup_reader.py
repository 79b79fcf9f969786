"""The row of the table `setup`: how this process is set up.

The drain thread reads it when recording begins, again after 1 s, 3 s, 7 s and so on, because libraries load plugins
when they first communicate, and at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from .devices import read_devices
from .mapped_libraries import MappedLibraries
from .network_interfaces import interfaces_listened_on, read_interfaces, read_links
from .processor_limits import read_limits, read_processors

library_facts: Final[dict[str, Callable[[], Mapping[str, Any]]]] = {}
"""Library that is hooked -> function that returns columns of the row which only the library knows."""

slower_recorder: Final[dict[str, str]] = {}
"""Library that the Python recorder records -> why the native one does not."""


class SetupReader:
    """Reader of the row of one recording."""

    def __init__(self) -> None:
        self._libraries = MappedLibraries()
        self._host: dict[str, Any] | None = None
        self._listened_on: list[str] = []
        self._last: dict[str, Any] = {}

    def changed_row(self, *, is_last: bool = False) -> dict[str, Any] | None:
        """Return the row; None if it is the same as the last one. Never raises.

        What cannot be read is missing. Interfaces that are listened on are looked for until there are some: a program
        may destroy its process groups before it ends, and the kernel takes milliseconds to list sockets. With
        `is_last`, the process is about to end, and does not wait for that.
        """
        if self._host is None:
            self._host = {
                "interfaces": _read(lambda: read_interfaces(read_links())),
                "limits": _read(read_limits),
                **(_read(read_devices) or {}),
                **(_read(read_processors) or {}),
            }
        if not self._listened_on and not (is_last and self._last):
            self._listened_on = _read(interfaces_listened_on) or []
        row = {
            "libraries": _read(self._libraries.read),
            **self._host,
            "listens_on": self._listened_on,
            "slower_recorder": {**slower_recorder},
        }
        for read in [*library_facts.values()]:
            row |= _read(read) or {}
        row = {name: value for name, value in row.items() if value not in (None, {}, [])}
        if row == self._last:
            return None
        self._last = row
        return row


def _read(read: Callable[[], Any]) -> Any:
    """Return what a function returns; None if it fails: a kernel may write its files in another form."""
    try:
        return read()
    except Exception:
        return None
