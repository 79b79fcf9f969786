"""Results that are files: one appears under its name when it is whole, and nothing is left behind after an error."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from commtrace.errors import OutputError


@contextlib.contextmanager
def atomic_write(out: Path, *, force: bool = False) -> Iterator[Path]:
    """The path to write to; the file is renamed to `out` at the end. `force`: replace `out` if it exists.

    Raises OutputError where it cannot be written, or exists.
    """
    if out.is_dir():
        raise OutputError(f"{out}: is a directory; give the name of a file in it")
    if os.path.lexists(out) and not force:
        raise OutputError(f"{out}: exists already; give another name, or --force to replace it")
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, out)
    except OSError as error:
        raise OutputError(f"{out}: cannot be written ({_reason(error)}); {_mend(error)}") from error
    finally:
        _remove(part)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _mend(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "make room, or give a file on another disk"
    if error.errno == errno.ENOENT:
        return "make its folder first"
    return "give a file in a folder where you may write"


def _remove(part: Path) -> None:
    try:
        part.unlink(missing_ok=True)
    except OSError:  # the folder does not exist, or the store is gone: there is nothing to remove, or no way to
        pass
