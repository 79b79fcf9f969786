"""Atomic output: a file or directory appears under its name only when it is complete, and not after an error.

Also what to do with standard output that cannot be written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from commtrace.errors import OutputError


@contextlib.contextmanager
def atomic_write(out: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to `out` at the end; `force` replaces an existing file.

    Raises:
        OutputError: `out` exists, or cannot be written.
    """
    if out.is_dir():
        raise OutputError(f"{out}: is a directory; give the name of a file in it")
    if os.path.lexists(out) and not force:
        raise OutputError(f"{out}: already exists; choose another name or pass --force")
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with _output_errors(out):
            yield part
            os.replace(part, out)
    finally:
        with contextlib.suppress(OSError):  # the folder does not exist, or its file system is gone
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(out: Path, *, force: bool = False, marker: str) -> Iterator[Path]:
    """Yield a temporary directory to write to, and rename it to `out` at the end.

    With `force`, an existing directory is replaced if it contains a file that matches the pattern `marker`.

    Raises:
        OutputError: `out` exists, or cannot be written.
    """
    if os.path.lexists(out):
        if not force:
            raise OutputError(f"{out}: already exists; choose another name or pass --force")
        if not any(out.glob(marker)):
            raise OutputError(f"{out}: has no {marker}, so --force does not replace it; choose another name")
    part, old = (out.with_name(f".{out.name}.{os.getpid()}.{suffix}") for suffix in ("part", "old"))
    try:
        with _output_errors(out):
            part.mkdir()
            yield part
            if os.path.lexists(out):
                out.rename(old)
            part.rename(out)
    finally:
        if old.exists() and not os.path.lexists(out):
            old.rename(out)
        for folder in (part, old):
            _remove_folder(folder)


def _remove_folder(folder: Path) -> None:
    """Remove a folder if it exists. It is renamed first, so that processes that still write to it add no new files."""
    removed = folder.with_name(f"{folder.name}.removed")
    with contextlib.suppress(OSError):
        folder.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


@contextlib.contextmanager
def _output_errors(out: Path) -> Iterator[None]:
    """Convert OSError to OutputError with a hint."""
    try:
        yield
    except OSError as error:
        hint = "make its folder first" if error.errno == errno.ENOENT else "give a file in a folder where you may write"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = "make room, or give a file on another disk"
        reason = (error.strerror or str(error)).lower()
        raise OutputError(f"{out}: cannot be written ({reason}); {hint}") from error


def discard_stdout() -> None:
    """Write what is left in the buffer of stdout nowhere: Python flushes it at exit, and would print a traceback."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
