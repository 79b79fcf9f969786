"""The compiled library: where it lies, how it is built, and how it is loaded.

Built once per environment by `commtrace build`, into the user's cache. Training only loads it: it never compiles, and
never waits for somebody who does.
"""

from __future__ import annotations

import platform
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from commtrace.errors import CommtraceError
from commtrace.schema import RECORD

from . import cache

NAME: Final = "commtrace_native"
_FOLDER: Final = Path(__file__).parent
_SOURCES: Final = ("module.cpp", "kernels.cpp", "waits.cpp", "frames.cpp", "device.cpp", "device_events.cpp")
_FLAGS: Final = ("-O2", "-fvisibility=hidden")
_LINKED: Final = ("-ldl",)


class NotBuiltError(CommtraceError):
    """There is no library for this environment yet."""


def path() -> Path:
    """Where this environment's library is, or will be. Other versions of Python, torch or commtrace have others."""
    files = (file for file in _FOLDER.iterdir() if file.suffix == ".h" or file.name in _SOURCES)
    return cache.place(
        NAME,
        (
            sysconfig.get_config_var("SOABI"),
            platform.python_version(),  # frames.cpp reads structures of this very version
            platform.machine(),
            torch.__version__,
            torch._C._GLIBCXX_USE_CXX11_ABI,
            _FLAGS,
            *(source.read_bytes() for source in sorted(files)),
        ),
    )


def load() -> Any:
    """The library as a module.

    Raises NotBuiltError, or ImportError or CommtraceError for a library that cannot be used here.
    """
    library = path()
    if not library.exists():
        raise NotBuiltError(f"the native recorder is not built for this environment ({library}); run `commtrace build`")
    return _imported(library)


def _imported(library: Path) -> ModuleType:
    module = cache.imported(NAME, library)
    fields: Any = RECORD.fields
    if module.layout() != {name: offset for name, (_, offset) in fields.items()}:
        raise CommtraceError(f"{library} writes records of another format; remove it and run `commtrace build`")
    return module


def build() -> Path:
    """Compile, unless it is done already; several processes may ask at once. Raises CommtraceError."""
    if not path().exists():
        _check_tools()
        cache.build_once(path(), _compile)
    return path()


def _compile(folder: Path) -> Path:
    from torch.utils import cpp_extension

    try:
        cpp_extension.load(
            NAME,
            [str(_FOLDER / source) for source in _SOURCES],
            extra_cflags=list(_FLAGS),
            extra_ldflags=list(_LINKED),
            build_directory=str(folder),
        )
    except (RuntimeError, ImportError) as error:
        raise CommtraceError(f"the native recorder could not be compiled; the Python one goes on.\n{error}") from error
    return folder / f"{NAME}.so"


def _check_tools() -> None:
    from torch.utils import cpp_extension

    cache.compiler()
    if not cpp_extension.is_ninja_available():
        raise CommtraceError("there is no ninja; run `pip install ninja`")
