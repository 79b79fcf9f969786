"""Compiled libraries in the user's cache: one folder for each, there at once or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from commtrace.errors import CommtraceError


def place(name: str, parts: Iterable[object]) -> Path:
    """Where the library of this name is, or will be, for an environment that these parts tell from others."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else f"{part}\n".encode())
    return cache / "commtrace" / f"{name}-{digest.hexdigest()[:20]}" / f"{name}.so"


def imported(name: str, library: Path) -> ModuleType:
    """The library as a module. Raises ImportError for one that cannot be used here."""
    spec = importlib.util.spec_from_file_location(name, library)
    if spec is None or spec.loader is None:
        raise ImportError(f"{library} is not a library")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_once(library: Path, compile_in: Callable[[Path], Path]) -> None:
    """Have `compile_in` make it in a folder (it says where), unless it is there already; several may ask at once.

    Raises CommtraceError.
    """
    target = library.parent
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{target}.lock", "w") as lock:
            _wait_for(lock)
            if not library.exists():
                _build(library, compile_in)
    except OSError as error:
        raise CommtraceError(
            f"{error.filename or target}: {error.strerror}; set XDG_CACHE_HOME to a folder to write to"
        ) from error


def _wait_for(lock: Any) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        pass  # a store without locks: each builds for itself, the first one's stays


def _build(library: Path, compile_in: Callable[[Path], Path]) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent.parent, prefix="building-") as folder:
        made = compile_in(Path(folder))
        finished = Path(folder) / "finished"
        finished.mkdir()
        shutil.copy(made, finished / library.name)
        try:
            finished.rename(library.parent)  # all at once: whoever looks finds nothing or everything
        except OSError:
            if not library.exists():
                raise


def compiler() -> str:
    """The C++ compiler. Raises CommtraceError where there is none, or no headers of this Python."""
    found = os.environ.get("CXX", "c++")
    if shutil.which(found) is None:
        raise CommtraceError(f"there is no C++ compiler ({found}); install one, or name one by CXX")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        raise CommtraceError(f"{header} is missing; install the headers of this Python (package python3-dev)")
    return found
