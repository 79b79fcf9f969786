"""Import of files and directories as a run."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from commtrace.errors import ImportFileError
from commtrace.output_files import atomic_directory

from .formats import Format, find_files, format_of
from .imported_log import ImportedRun, write_imported_log

MARKER: Final = "*/*/rank*.jsonl"
"""What a directory has that an import may replace."""


def import_files(paths: Sequence[Path], out: Path, named: Format | None = None, *, force: bool = False) -> ImportedRun:
    """Import files and the files in directories as one run, whose log is written to a new directory.

    Args:
        paths: Files and directories.
        out: The directory.
        named: The format of all files; None: told from their contents.
        force: Whether to replace a log in the directory.

    Raises:
        ImportFileError: A file cannot be imported, or none has a call.
        OutputError: The log cannot be written.
    """
    files = find_files(paths, named)
    with atomic_directory(out, force=force, marker=MARKER) as folder:
        imported = write_imported_log(files, folder, _run_name(paths))
        if not imported.calls:
            problems = "".join(f"; {problem}" for problem in imported.problems[:1])
            raise ImportFileError(f"{paths[0]}: no communication call in it{problems}")
        return imported


def _run_name(paths: Sequence[Path]) -> str:
    name = paths[0].resolve().name
    plain = re.sub(r"(\.pt)?(\.trace)?\.\w+(\.gz)?$", "", name) if paths[0].is_file() else name
    return re.sub(r"[^A-Za-z0-9._-]", "_", plain).lstrip(".")[:200] or "imported"


def is_importable(path: Path) -> bool:
    """Return whether a path is a file that can be imported, or a directory with one at its top."""
    if path.is_dir():
        return any(file.is_file() and format_of(file) is not None for file in sorted(path.iterdir())[:100])
    return path.is_file() and format_of(path) is not None


_TEMPORARY: Final[list[tempfile.TemporaryDirectory[str]]] = []
"""Logs of files that were opened as runs; they are removed when the process ends."""


def import_for_reading(path: Path) -> Path:
    """Import a file or directory to a temporary log, which is removed when the process ends, and return its path.

    Raises:
        ImportFileError: A file cannot be imported, or none has a call.
    """
    _TEMPORARY.append(tempfile.TemporaryDirectory(prefix="commtrace-import-"))
    out = Path(_TEMPORARY[-1].name) / "log"
    import_files([path], out)
    return out
