"""The compiled wrappers of mpi4py's methods: where they lie, how they are built and loaded. They need no torch."""

from __future__ import annotations

import platform
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from commtrace.errors import CommtraceError
from commtrace.schema import RECORD

from . import cache

NAME: Final = "commtrace_mpi"
_FOLDER: Final = Path(__file__).parent
_SOURCES: Final = ("mpi.cpp", "frames.cpp")
_HEADERS: Final = ("frames.h", "slots.h")
_FLAGS: Final = ("-O2", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden")


def path() -> Path:
    """Where this environment's library is, or will be. Other versions of Python or commtrace have others."""
    return cache.place(
        NAME,
        (
            sysconfig.get_config_var("SOABI"),
            platform.python_version(),  # frames.cpp reads structures of this very version
            platform.machine(),
            _FLAGS,
            *((_FOLDER / name).read_bytes() for name in (*_SOURCES, *_HEADERS)),
        ),
    )


def load() -> ModuleType | None:
    """The library; None where it is not built. Raises ImportError or CommtraceError where it cannot be used."""
    library = path()
    if not library.exists():
        return None
    module: Any = cache.imported(NAME, library)
    fields: Any = RECORD.fields
    if any(fields[name][1] != offset for name, offset in module.layout().items()):
        raise CommtraceError(f"{library} writes records of another format; remove it and run `commtrace build`")
    return module  # type: ignore[no-any-return]


def build() -> Path:
    """Compile, unless it is done already; several processes may ask at once. Raises CommtraceError."""
    if not path().exists():
        cache.compiler()
        cache.build_once(path(), _compile)
    return path()


def _compile(folder: Path) -> Path:
    made = folder / f"{NAME}.so"
    include = sysconfig.get_paths()["include"]
    command = [cache.compiler(), *_FLAGS, f"-I{include}", *(str(_FOLDER / name) for name in _SOURCES), "-o", str(made)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise CommtraceError(f"the wrappers of mpi4py could not be compiled; Python's go on.\n{result.stderr}")
    return made
