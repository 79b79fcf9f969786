"""The two compiled libraries: where they are, how they are built, and how they are loaded.

`TORCH` holds the native recorder of torch.distributed, `MPI` the wrappers of mpi4py's methods, which need no torch.
`commtrace build` builds each once per environment, into a folder of the user's cache that is complete as soon as it
exists. Training only loads them: it never compiles, and never waits for a process that does.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from commtrace import launchers
from commtrace.errors import CommtraceError
from commtrace.process_setup.setup_reader import slower_recorder
from commtrace.schema import RECORD

_FOLDER: Final = Path(__file__).parent
_FLAGS: Final = ("-O2", "-std=c++20", "-fPIC", "-fvisibility=hidden")


PYTHON_REQUESTED: Final = "COMMTRACE_RECORDER=python"
NOT_BUILT: Final = "the native recorder is not built for this environment (run `commtrace build`)"


def note_choice(library: str, reason: str) -> bool:
    """Note for the log why the Python recorder records a library, "" if the native one does; return whether it does."""
    slower_recorder.pop(library, None)
    if reason:
        slower_recorder[library] = reason[:1000]
    return not reason


def missing_compiler() -> str:
    """Return why the libraries cannot be built here; "" if they can, as far as that is known without trying."""
    try:
        _compiler()
    except CommtraceError as error:
        return str(error)
    return ""


class NotBuiltError(CommtraceError):
    """There is no library for this environment yet."""


class Flags(NamedTuple):
    """Compiler arguments besides those that every library needs."""

    compile: tuple[str, ...] = ()
    link: tuple[str, ...] = ()


@dataclass(frozen=True)
class Library:
    """A compiled library in the user's cache. Nothing is read or imported before it is used.

    Attributes:
        name: Name of the Python module that it becomes.
        sources: C++ files in this folder, compiled in parallel.
        included: Files in this folder that the sources include.
        versions: Returns the versions, besides Python's, that a build depends on.
        flags: Returns further compiler arguments. Called only to build.
    """

    name: str
    sources: Sequence[str]
    included: Sequence[str]
    versions: Callable[[], Sequence[object]] = tuple
    flags: Callable[[], Flags] = Flags

    def path(self) -> Path:
        """Return the library's path, built or not: one per version of Python, torch and commtrace."""
        digest = hashlib.sha256()
        for component in (
            sysconfig.get_config_var("SOABI"),
            platform.python_version(),  # frames.cpp reads structures of exactly this version
            platform.machine(),
            *self.versions(),
            _FLAGS,
        ):
            digest.update(f"{component}\n".encode())
        for file in sorted({*self.sources, *self.included}):
            digest.update((_FOLDER / file).read_bytes())
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        return cache / "commtrace" / f"{self.name}-{digest.hexdigest()[:20]}" / f"{self.name}.so"

    def load(self) -> Any:
        """Import the library and return its module.

        Raises:
            NotBuiltError: It is not built for this environment.
            ImportError: It cannot be imported.
            CommtraceError: It writes another record format.
        """
        path = self.path()
        if not path.exists():
            raise NotBuiltError(f"{self.name} is not built for this environment ({path}); run `commtrace build`")
        spec = importlib.util.spec_from_file_location(self.name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a library")
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        fields: Any = RECORD.fields
        if module.layout() != {name: offset for name, (_, offset) in fields.items()}:
            raise CommtraceError(f"{path} writes another record format; remove it and run `commtrace build`")
        return module

    def build(self) -> Path:
        """Compile the library unless it is built already; several processes may do so at once.

        Returns:
            Its path.

        Raises:
            CommtraceError: There is no compiler, the code does not compile, or the cache cannot be written to.
        """
        path = self.path()
        if path.exists():
            return path
        compiler, target = _compiler(), path.parent
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            lock = Path(f"{target}.lock")
            with lock.open("w") as file:
                with suppress(OSError):  # a file system without locks: every process builds, the first result stays
                    fcntl.flock(file, fcntl.LOCK_EX)
                    for leftover in target.parent.glob(f"{_build_prefix(target)}*"):  # of a killed build on this host
                        shutil.rmtree(leftover, ignore_errors=True)
                if not path.exists():
                    self._compile(compiler, target)
            lock.unlink(missing_ok=True)  # processes that still wait for it then find the library
        except OSError as error:
            raise CommtraceError(
                f"{error.filename or target}: {error.strerror}; set XDG_CACHE_HOME to a writable folder"
            ) from error
        return path

    def _compile(self, compiler: str, target: Path) -> None:
        flags = self.flags()
        include = f"-I{sysconfig.get_paths()['include']}"
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=_build_prefix(target)) as folder:
            objects = [f"{folder}/{Path(source).stem}.o" for source in self.sources]
            commands = [
                [compiler, *_FLAGS, include, *flags.compile, "-c", str(_FOLDER / source), "-o", output]
                for source, output in zip(self.sources, objects, strict=True)
            ]
            with ThreadPoolExecutor(launchers.usable_cores()) as pool:
                list(pool.map(self._run, commands))
            finished = Path(folder) / "finished"
            finished.mkdir()
            self._run([compiler, "-shared", *objects, *flags.link, "-o", str(finished / f"{self.name}.so")])
            try:
                finished.rename(target)  # atomic: other processes see nothing or the complete folder
            except OSError:
                if not target.exists():
                    raise

    def _run(self, command: list[str]) -> None:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise CommtraceError(
                f"{self.name} cannot be compiled; the Python recorder is used instead.\n"
                f"{' '.join(command)}\n{result.stderr}"
            )


def _build_prefix(target: Path) -> str:
    return f"{target.name}.building-{platform.node()}-"  # not every file system's locks hold between hosts


def _compiler() -> str:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise CommtraceError(f"there is no C++ compiler ({compiler}); install one, or set CXX")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        raise CommtraceError(f"{header} is missing; install the headers of this Python (package python3-dev)")
    return compiler


def _torch_versions() -> tuple[object, ...]:
    import torch

    return torch.__version__, torch._C._GLIBCXX_USE_CXX11_ABI


def _torch_flags() -> Flags:
    import torch
    from torch.utils import cpp_extension  # slow to import; needed only to build

    defines = {
        "TORCH_EXTENSION_NAME": TORCH.name,
        "TORCH_API_INCLUDE_EXTENSION_H": 1,
        "_GLIBCXX_USE_CXX11_ABI": int(torch._C._GLIBCXX_USE_CXX11_ABI),
    }
    for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):  # up to torch 2.8: pybind11 shares types if these match
        value = getattr(torch._C, f"_PYBIND11_{name}", None)
        if value is not None:
            defines[f"PYBIND11_{name}"] = f'"{value}"'
    includes = [argument for path in cpp_extension.include_paths() for argument in ("-isystem", path)]
    libraries = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-ldl")
    return Flags(
        (*(f"-D{name}={value}" for name, value in defines.items()), *includes),
        (*(f"-L{path}" for path in cpp_extension.library_paths()), *libraries),
    )


TORCH: Final = Library(
    "commtrace_native",
    ("module.cpp", "frames.cpp"),
    [path.name for pattern in ("*.h", "*.cpp") for path in _FOLDER.glob(pattern)],
    _torch_versions,
    _torch_flags,
)
MPI: Final = Library(
    "commtrace_mpi", ("mpi.cpp", "frames.cpp"), ("callsites.h", "frames.h", "progress.h", "record.h", "slots.h")
)
