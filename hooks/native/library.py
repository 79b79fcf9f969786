"""The compiled library: where it lies, how it is built, and how it is loaded.

Built once per environment by `commtrace build`, into the user's cache. Training only loads it: it never compiles, and
never waits for somebody who does.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from commtrace.errors import CommtraceError
from commtrace.schema import RECORD

NAME: Final = "commtrace_native"
_FOLDER: Final = Path(__file__).parent
_SOURCES: Final = ("module.cpp", "kernels.cpp", "waits.cpp", "frames.cpp", "device.cpp", "device_events.cpp")
_FLAGS: Final = ("-O2", "-fvisibility=hidden")
_LINKED: Final = ("-ldl",)


class NotBuiltError(CommtraceError):
    """There is no library for this environment yet."""


def path() -> Path:
    """Where this environment's library is, or will be. Other versions of Python, torch or commtrace have others."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "commtrace" / f"{NAME}-{_key()}" / f"{NAME}.so"


def _key() -> str:
    digest = hashlib.sha256()
    for part in (
        sysconfig.get_config_var("SOABI"),
        platform.python_version(),  # frames.cpp reads structures of this very version
        platform.machine(),
        torch.__version__,
        torch._C._GLIBCXX_USE_CXX11_ABI,
        _FLAGS,
    ):
        digest.update(f"{part}\n".encode())
    for source in sorted(file for file in _FOLDER.iterdir() if file.suffix in (".cpp", ".h")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


def load() -> Any:
    """The library as a module.

    Raises NotBuiltError, or ImportError or CommtraceError for a library that cannot be used here.
    """
    library = path()
    if not library.exists():
        raise NotBuiltError(f"the native recorder is not built for this environment ({library}); run `commtrace build`")
    return _imported(library)


def _imported(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, library)
    if spec is None or spec.loader is None:
        raise ImportError(f"{library} is not a library")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fields: Any = RECORD.fields
    if module.layout() != {name: offset for name, (_, offset) in fields.items()}:
        raise CommtraceError(f"{library} writes records of another format; remove it and run `commtrace build`")
    return module


def build() -> Path:
    """Compile, unless it is done already; several processes may ask at once. Raises CommtraceError."""
    target = path().parent
    if path().exists():
        return path()
    _check_tools()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{target}.lock", "w") as lock:
            _wait_for(lock)
            if not path().exists():
                _build(target)
    except OSError as error:
        raise CommtraceError(
            f"{error.filename or target}: {error.strerror}; set XDG_CACHE_HOME to a folder to write to"
        ) from error
    return path()


def _wait_for(lock: Any) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        pass  # a store without locks: each builds for itself, the first one's stays


def _build(target: Path) -> None:
    from torch.utils import cpp_extension

    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as folder:
        try:
            cpp_extension.load(
                NAME,
                [str(_FOLDER / source) for source in _SOURCES],
                extra_cflags=list(_FLAGS),
                extra_ldflags=list(_LINKED),
                build_directory=folder,
            )
        except (RuntimeError, ImportError) as error:
            raise CommtraceError(
                f"the native recorder could not be compiled; the Python one goes on.\n{error}"
            ) from error
        finished = Path(folder) / "finished"
        finished.mkdir()
        shutil.copy(Path(folder) / f"{NAME}.so", finished / f"{NAME}.so")
        try:
            finished.rename(target)  # all at once: whoever looks finds nothing or everything
        except OSError:
            if not path().exists():
                raise


def _check_tools() -> None:
    from torch.utils import cpp_extension

    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise CommtraceError(f"there is no C++ compiler ({compiler}); install one, or name one by CXX")
    if not cpp_extension.is_ninja_available():
        raise CommtraceError("there is no ninja; run `pip install ninja`")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        raise CommtraceError(f"{header} is missing; install the headers of this Python (package python3-dev)")
