"""Errors that name the line of the program that wants to change a file or to send something to a service.

An audit hook, which Python calls before it opens, renames or deletes a file. It only explains: writers in other
languages are stopped by `write_denial` alone.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, Final

from commtrace.dryrun.notices import add_notice

from .network_writers import refuse_request
from .policy import Writes
from .write_denial import ALWAYS_WRITABLE

_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGES: Final = {
    "os.remove": 1, "os.rmdir": 1, "os.rename": 2, "os.link": 2, "os.truncate": 1, "os.chmod": 1, "os.chown": 1,
    "os.utime": 1, "os.setxattr": 1, "os.removexattr": 1,
}  # fmt: skip
"""Event -> number of its leading arguments that are paths."""
_CREATIONS: Final = {"os.mkdir": 0, "os.symlink": 1, "sqlite3.connect": 0}
"""Event -> position of the path, which is only created if it does not exist."""


class RefusedWriteError(PermissionError):
    """The program changes a file, and the dry run gives it no private copy."""


def install(writes: Writes, writable: Sequence[str]) -> None:
    """Refuse requests that change something elsewhere and, if writes are refused, changes outside some directories."""
    guard = _FileGuard([os.path.realpath(path) for path in (*ALWAYS_WRITABLE, *writable, tempfile.gettempdir())])
    check_files = writes is Writes.REFUSE

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        handler = _HANDLERS.get(event)
        if handler is not None and check_files:
            handler(guard, event, arguments)
        elif event == "http.client.send":
            connection, data = arguments
            refuse_request(connection.host, data)

    sys.addaudithook(hook)


def install_renaming() -> None:
    """Let `os.rename` and `os.replace` copy a directory that the layer of an unprivileged process cannot rename."""
    os.rename, os.replace = _renaming(os.rename), _renaming(os.replace)


def _renaming(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def rename(src: Any, dst: Any, **options: Any) -> None:
        try:
            original(src, dst, **options)
        except OSError as error:
            if error.errno != errno.EXDEV or options or not os.path.isdir(src) or os.path.islink(src):
                raise
            if os.path.lexists(dst):
                os.rmdir(dst)  # as rename does: only an empty directory is replaced
            shutil.copytree(src, dst, symlinks=True)
            shutil.rmtree(src)

    return rename


class _FileGuard:
    """The directories in which the program may write."""

    def __init__(self, writable: Sequence[str]) -> None:
        self._writable = tuple(os.path.join(path, "") for path in writable)

    def open(self, _: str, arguments: tuple[Any, ...]) -> None:
        """Check `open` and `os.open`."""
        path, _mode, flags = arguments
        if isinstance(flags, int) and flags & _WRITING:
            self._check(path)

    def change(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Check a change of an existing file."""
        if _exists(arguments[0]):
            for path in arguments[: _CHANGES[event]]:
                self._check(path)

    def create(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Check the creation of a directory, link or database."""
        path = arguments[_CREATIONS[event]]
        if not _exists(path) and path not in ("", ":memory:", b":memory:"):
            self._check(path)

    def _check(self, path: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a file descriptor, which was checked when it was opened
        text = os.fsdecode(path)
        directory, name = os.path.split(os.path.abspath(text))
        real = os.path.join(os.path.realpath(directory), name)
        if not real.startswith(self._writable):
            add_notice(f"changes {real}: refused", also_libraries=True)
            raise RefusedWriteError(
                errno.EACCES,
                "a dry run that refuses writes (--writes) lets the program change files only in the temporary "
                "directory; leave saving out, or use --writes allow",
                text,
            )


_HANDLERS: Final[dict[str, Callable[[_FileGuard, str, tuple[Any, ...]], None]]] = {
    "open": _FileGuard.open,
    **dict.fromkeys(_CHANGES, _FileGuard.change),
    **dict.fromkeys(_CREATIONS, _FileGuard.create),
}


def _exists(path: Any) -> bool:
    try:
        return os.path.lexists(path)
    except (TypeError, ValueError):
        return False
