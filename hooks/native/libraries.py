"""The two compiled libraries: where they are, how they are built, and how they are loaded.

`TORCH` holds the native recorder of torch.distributed, `MPI` the wrappers of mpi4py's methods, which need no torch.
A binary wheel ships both, for one version of Python and every torch that was released when it was built. For other
environments, and where commtrace was installed from its source, `commtrace build` builds each once per environment,
into a folder of the user's cache that is complete as soon as it exists. Training only loads them: it never compiles,
and never waits for a process that does.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import re
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

from commtrace.errors import CommtraceError
from commtrace.process_setup.processor_limits import usable_cores
from commtrace.process_setup.setup_reader import slower_recorder
from commtrace.schema import RECORD

_FOLDER: Final = Path(__file__).parent
SHIPPED: Final = _FOLDER / "shipped"
"""Folder of a binary wheel's libraries, which setup.py puts there."""
_FLAGS: Final = ("-O2", "-std=c++20", "-fPIC", "-fvisibility=hidden")


PYTHON_REQUESTED: Final = "COMMTRACE_RECORDER=python"
REMEDY: Final = "run `commtrace build`"
"""What the reasons end with that a build removes."""


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


class TorchBuild(NamedTuple):
    """How torch was built, which is how the native recorder must be built.

    Attributes:
        version: Version of torch.
        cxx11_abi: Whether strings have the namespace std::__cxx11.
        pybind11: Up to torch 2.8, the compiler, library and ABI with which pybind11 marks the types that it shares.
    """

    version: str
    cxx11_abi: bool
    pybind11: tuple[str, ...]

    @classmethod
    def of_this_environment(cls) -> TorchBuild:
        """Return that of the installed torch."""
        import torch

        marks = (getattr(torch._C, f"_PYBIND11_{name}", None) for name in _PYBIND11)
        return cls(torch.__version__, bool(torch._C._GLIBCXX_USE_CXX11_ABI), tuple(filter(None, marks)))

    @property
    def tag(self) -> str:
        """Part of the name of a library that was built for this torch and its patch releases; "" if it is no release.

        A version between releases, such as that of a container ("2.8.0a0+5228986c39.nv25.5"), may have any headers.
        """
        release = re.fullmatch(r"(\d+\.\d+)\.\d+(\+.*)?", self.version)
        strings = "" if self.cxx11_abi else "-oldstrings"
        return f"-torch{release[1]}{strings}{''.join(self.pybind11).replace('_', '-')}" if release else ""

    def defines(self) -> dict[str, str]:
        """Return the macros that the sources are compiled with."""
        return {
            "TORCH_EXTENSION_NAME": TORCH.name,
            "TORCH_API_INCLUDE_EXTENSION_H": "1",
            "_GLIBCXX_USE_CXX11_ABI": str(int(self.cxx11_abi)),
            **{f"PYBIND11_{name}": f'"{value}"' for name, value in zip(_PYBIND11, self.pybind11, strict=False)},
        }


_PYBIND11: Final = ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")


@dataclass(frozen=True)
class Library:
    """A compiled library. Nothing is read or imported before it is used.

    Attributes:
        name: Name of the Python module that it becomes.
        sources: C++ files in this folder, compiled in parallel.
        included: Files in this folder that the sources include.
        torch: Returns how the torch was built that a build depends on; None if it needs no torch.
        flags: Returns further compiler arguments. Called only to build.
    """

    name: str
    sources: Sequence[str]
    included: Sequence[str]
    torch: Callable[[], TorchBuild] | None = None
    flags: Callable[[], Flags] = Flags

    def path(self) -> Path:
        """Return the path in the user's cache, built or not: one per version of Python, torch and commtrace."""
        digest = hashlib.sha256()
        for component in (
            sysconfig.get_config_var("SOABI"),
            platform.python_version(),  # frames.cpp reads structures of this version
            platform.machine(),
            *(self.torch() if self.torch is not None else ()),
            _FLAGS,
        ):
            digest.update(f"{component}\n".encode())
        for file in sorted({*self.sources, *self.included}):
            digest.update((_FOLDER / file).read_bytes())
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        return cache / "commtrace" / f"{self.name}-{digest.hexdigest()[:20]}" / f"{self.name}.so"

    def shipped(self) -> Path | None:
        """Return the path of the library that a binary wheel ships for this environment; None if there is none."""
        tag = self.torch().tag if self.torch is not None and SHIPPED.is_dir() else ""
        path = SHIPPED / f"{self.name}{tag}{sysconfig.get_config_var('EXT_SUFFIX')}"
        return path if path.exists() else None

    def available(self) -> bool:
        """Return whether there is a library for this environment, shipped or built."""
        return self.shipped() is not None or self.path().exists()

    def load(self) -> Any:
        """Import the library and return its module: the one that a wheel ships, or else the one that was built.

        Raises:
            NotBuiltError: It is not built for this environment.
            ImportError: It cannot be imported.
            CommtraceError: It was built for another Python or torch, or writes another record format.
        """
        shipped = self.shipped()
        if shipped is not None:
            try:
                return self._load(shipped)
            except (ImportError, CommtraceError):
                if not self.path().exists():
                    raise
        path = self.path()  # once: it reads all sources
        if not path.exists():
            raise NotBuiltError(self._not_built())
        return self._load(path)

    def _load(self, path: Path) -> Any:
        spec = importlib.util.spec_from_file_location(self.name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a library")
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        fields: Any = RECORD.fields
        if module.layout() != {name: offset for name, (_, offset) in fields.items()}:
            raise CommtraceError(f"{path} writes another record format; remove it and {REMEDY}")
        if not module.frames_agree():
            version = platform.python_version()
            raise CommtraceError(f"{path} was built for a Python whose frames differ from those of {version}; {REMEDY}")
        if self.torch is not None:
            import torch.distributed  # its types are registered when it is imported

            if torch.distributed.is_available() and not module.shares_types():
                raise CommtraceError(f"{path} was built for a torch whose pybind11 differs from this one's; {REMEDY}")
        return module

    def _not_built(self) -> str:
        """Return why there is no library to load."""
        if not SHIPPED.is_dir():
            return f"the native recorder is not built for this environment; {REMEDY}"
        python = f"Python {platform.python_version()}"
        if self.torch is None:
            return f"this wheel of commtrace has no compiled wrappers for {python}; {REMEDY}"
        names = (re.search(r"-torch(\d+)\.(\d+)", path.name) for path in SHIPPED.iterdir())
        held = sorted({(int(name[1]), int(name[2])) for name in names if name is not None})
        range_held = f"{_dotted(held[0])} to {_dotted(held[-1])}" if held else "no torch"
        build = self.torch()
        return (
            f"this wheel of commtrace has the native recorder for releases of torch {range_held} as they are on PyPI, "
            f"not for torch {build.version} with {python}; {REMEDY}"
        )

    def build(self) -> Path:
        """Compile the library unless it is shipped or built already; several processes may do so at once.

        Returns:
            Its path.

        Raises:
            CommtraceError: There is no compiler, the code does not compile, or the cache cannot be written to.
        """
        shipped, path = self.shipped(), self.path()
        if shipped is not None:
            with suppress(ImportError, CommtraceError):
                self._load(shipped)
                return shipped
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
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=_build_prefix(target)) as folder:
            finished = Path(folder) / "finished"
            finished.mkdir()
            self.compile(compiler, Path(sysconfig.get_paths()["include"]), self.flags(), finished / f"{self.name}.so")
            try:
                finished.rename(target)  # atomic: other processes see nothing or the complete folder
            except OSError:
                if not target.exists():
                    raise

    def compile(self, compiler: str, python: Path, flags: Flags, to: Path) -> None:
        """Compile the library for the Python whose headers are in this folder, and write it to this file.

        Raises:
            CommtraceError: The code does not compile.
        """
        with tempfile.TemporaryDirectory(dir=to.parent) as folder:
            objects = [f"{folder}/{Path(source).stem}.o" for source in self.sources]
            commands = [
                [compiler, *_FLAGS, f"-I{python}", *flags.compile, "-c", str(_FOLDER / source), "-o", output]
                for source, output in zip(self.sources, objects, strict=True)
            ]
            with ThreadPoolExecutor(usable_cores()) as pool:
                list(pool.map(self._run, commands))
            self._run([compiler, "-shared", *objects, *flags.link, "-o", str(to)])

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


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def torch_flags(build: TorchBuild, includes: Sequence[str | Path], libraries: Sequence[str | Path]) -> Flags:
    """Return the arguments to compile and link the native recorder with these folders of torch's files."""
    return Flags(
        (
            *(f"-D{name}={value}" for name, value in build.defines().items()),
            *(argument for path in includes for argument in ("-isystem", str(path))),
        ),
        (*(f"-L{path}" for path in libraries), *(f"-l{name}" for name in TORCH_LIBRARIES), "-ldl"),
    )


def _flags_of_this_environment() -> Flags:
    from torch.utils import cpp_extension  # slow to import; needed only to build

    build = TorchBuild.of_this_environment()
    return torch_flags(build, cpp_extension.include_paths(), cpp_extension.library_paths())


TORCH_LIBRARIES: Final = ("c10", "torch_cpu", "torch", "torch_python")
TORCH: Final = Library(
    "commtrace_native",
    ("module.cpp", "frames.cpp"),
    [path.name for pattern in ("*.h", "*.cpp") for path in _FOLDER.glob(pattern)],
    TorchBuild.of_this_environment,
    _flags_of_this_environment,
)
MPI: Final = Library(
    "commtrace_mpi", ("mpi.cpp", "frames.cpp"), ("callsites.h", "frames.h", "progress.h", "record.h", "slots.h")
)
