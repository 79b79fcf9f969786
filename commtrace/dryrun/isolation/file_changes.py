"""What a rank changed in its private layer."""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple

from .private_layer import MOUNTS

_MAX_COMPARED_BYTES: Final = 1 << 26
_ATTRIBUTES: Final = ("trusted.overlay.", "user.overlay.")


class FileChange(NamedTuple):
    """A file, or an empty or renamed directory, that the program would have created, changed, renamed or deleted."""

    path: str
    change: Literal["created", "changed", "renamed", "deleted"]
    nbytes: int | None  # size; None: of a directory or a deleted file


def file_changes(layer: Path) -> list[FileChange]:
    """Return the changes in a layer, ordered by path. Files that were created and deleted again are not included."""
    try:
        covered = json.loads((layer / MOUNTS).read_text())["covered"]
    except OSError:
        return []
    changes = [*_created(layer / "root", layer / "root")]
    for source, folder in covered:
        upper = Path(folder, "upper")
        changes += _changes(upper, Path(source))
    return sorted(changes)


def _created(directory: Path, root: Path) -> Iterator[FileChange]:
    """Yield the files in directories of the new root that are not in the original ones."""
    for entry in os.scandir(directory):
        original = Path("/", os.path.relpath(entry.path, root))
        if entry.is_dir(follow_symlinks=False):
            yield from _created(Path(entry.path), root)
        elif not os.path.lexists(original):
            yield FileChange(str(original), "created", entry.stat(follow_symlinks=False).st_size)


def _changes(upper: Path, original: Path) -> Iterator[FileChange]:
    """Yield what an overlay's upper directory changes in the original directory."""
    for entry in os.scandir(upper):
        path, status = original / entry.name, entry.stat(follow_symlinks=False)
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            yield from _deleted(path)
        elif stat.S_ISDIR(status.st_mode):
            yield from _changes_of_directory(Path(entry.path), path)
        elif not os.path.lexists(path):
            yield FileChange(str(path), "created", status.st_size)
        elif not _is_same(Path(entry.path), path, status):
            yield FileChange(str(path), "changed", status.st_size)


def _changes_of_directory(upper: Path, path: Path) -> Iterator[FileChange]:
    if _attribute(upper, "redirect"):
        yield FileChange(str(path), "renamed", None)
    elif not path.is_dir():
        if not os.listdir(upper):
            yield FileChange(str(path), "created", None)
    elif _attribute(upper, "opaque"):  # deleted and made again
        for name in sorted({*os.listdir(path)} - {*os.listdir(upper)}):
            yield from _deleted(path / name)
    yield from _changes(upper, path)


def _deleted(path: Path) -> Iterator[FileChange]:
    if os.path.lexists(path):
        yield FileChange(str(path), "deleted", None)


def _is_same(upper: Path, original: Path, status: os.stat_result) -> bool:
    """Return whether a file was only opened for writing."""
    try:
        before = original.lstat()
        return (
            stat.S_ISREG(status.st_mode)
            and (before.st_mode, before.st_size) == (status.st_mode, status.st_size)
            and status.st_size <= _MAX_COMPARED_BYTES
            and filecmp.cmp(upper, original, shallow=False)
        )
    except OSError:
        return False


def _attribute(path: Path, name: str) -> bytes:
    for prefix in _ATTRIBUTES:
        with contextlib.suppress(OSError):
            return os.getxattr(path, prefix + name, follow_symlinks=False)
    return b""
