"""What the native recorder is compiled against: headers and symbols of every torch release, read from PyPI.

Only these parts of a release are fetched, about 130 of up to 900 MB, and kept in a folder.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import urllib.request
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from commtrace.hooks.native.libraries import TorchBuild

INDEX: Final = "https://pypi.org/simple/torch/"
FIRST: Final = (2, 6)
"""The oldest torch that is supported, as in setup.cfg."""
LIBRARIES: Final = ("libc10", "libtorch_cpu", "libtorch_python")
"""What the native recorder is linked to. A program that imports torch has loaded them already."""
_SECONDS: Final = 120


@dataclass(frozen=True)
class Release:
    """A release of torch for one kind of machine.

    Attributes:
        version: For example "2.8.0".
        machine: As `platform.machine()` returns it.
        urls: Tag of a Python, for example "cp311" -> address of the wheel for it.
    """

    version: str
    machine: str
    urls: Mapping[str, str]

    @property
    def minor(self) -> tuple[int, int]:
        """The version without its last number."""
        major, minor, *_ = self.version.split(".")
        return int(major), int(minor)


class HttpFile(io.RawIOBase):
    """A file on a server that is read in ranges, so that a member of a large archive can be read alone."""

    def __init__(self, url: str) -> None:
        self._url, self._at = url, 0
        with self._request(0, 1) as answer:
            self._size = int(answer.headers["Content-Range"].split("/")[1])

    def _request(self, begin: int, size: int) -> Any:
        request = urllib.request.Request(self._url, headers={"Range": f"bytes={begin}-{begin + size - 1}"})
        answer = urllib.request.urlopen(request, timeout=_SECONDS)
        if answer.status != 206:
            raise OSError(f"{self._url}: the server does not send parts of files")
        return answer

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._size - self._at)
        if size <= 0:
            return 0
        with self._request(self._at, size) as answer:
            data = answer.read()
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def releases(machine: str) -> list[Release]:
    """Return the newest patch release of every supported minor version, the oldest first."""
    request = urllib.request.Request(INDEX, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        files = json.load(answer)["files"]
    found: dict[tuple[int, int, int], dict[str, str]] = defaultdict(dict)
    for file in files:
        name = re.fullmatch(
            rf"torch-(\d+)\.(\d+)\.(\d+)-(?:\d+-)?(cp\d+)-\4-manylinux\w*_{machine}\.whl", file["filename"]
        )
        if name is not None and not file.get("yanked"):
            found[int(name[1]), int(name[2]), int(name[3])][name[4]] = file["url"]
    newest = {version[:2]: version for version in sorted(found) if version[:2] >= FIRST}
    return [Release(".".join(map(str, version)), machine, found[version]) for version in newest.values()]


class TorchFiles:
    """The parts of a release that a build needs. They are fetched once and kept.

    Attributes:
        release: The release.
        include: Folder of the headers, which are the same for every Python.
    """

    def __init__(self, release: Release, folder: Path) -> None:
        self.release = release
        self._folder = folder / f"torch-{release.version}-{release.machine}"
        self.include = self._folder / "torch/include"
        complete = self._folder / "complete"
        if not complete.exists():
            shutil.rmtree(self._folder, ignore_errors=True)
            self._fetch(next(iter(release.urls.values())), "torch/include/", *(_path(name) for name in LIBRARIES[:2]))
            for name in LIBRARIES[:2]:
                self._keep_symbols(self._folder / _path(name), name)
            complete.touch()

    def _fetch(self, url: str, *wanted: str) -> None:
        # A buffer this large reads the thousands of headers, which are neighbours, with few requests.
        with zipfile.ZipFile(io.BufferedReader(HttpFile(url), 1 << 22)) as archive:
            members = (member for member in archive.infolist() if member.filename.startswith(wanted))
            for member in sorted(members, key=lambda member: member.header_offset):
                archive.extract(member, self._folder)

    def _keep_symbols(self, library: Path, name: str) -> None:
        (self._folder / f"{name}.symbols").write_text("\n".join(sorted(_defined(library))))
        library.unlink()

    def symbols(self, python: str) -> set[str]:
        """Return the names that the libraries for a Python define."""
        self.internals(python)
        names = (*LIBRARIES[:2], f"{LIBRARIES[2]}-{python}")
        return {line for name in names for line in (self._folder / f"{name}.symbols").read_text().splitlines()}

    def internals(self, python: str) -> str:
        """Return the name under which torch for a Python shares pybind11's types with modules that were built alike."""
        kept = self._folder / f"internals-{python}"
        if not kept.exists():
            library = self._folder / _path(LIBRARIES[2])
            self._fetch(self.release.urls[python], _path(LIBRARIES[2]))
            name = internals(library)
            self._keep_symbols(library, f"{LIBRARIES[2]}-{python}")
            kept.write_text(name)  # last: it says that the symbols are there
        return kept.read_text()

    def build(self, python: str) -> TorchBuild:
        """Return how torch for a Python was built, as the recorder must be built, too."""
        # The namespace of strings shows in the name of a function that takes one.
        symbols = (self._folder / f"{LIBRARIES[0]}.symbols").read_text().split()
        strings = any("__cxx11" in name for name in symbols if "torchCheckFail" in name)
        marks = re.fullmatch(r"__pybind11_internals_v\d+(_gcc)(_libstdcpp)(_cxxabi\d+)__", self.internals(python))
        return TorchBuild(self.release.version, strings, marks.groups() if marks else ())


def _path(library: str) -> str:
    """Return where a wheel of torch has a library."""
    return f"torch/lib/{library}.so"


def internals(library: Path) -> str:
    """Return the name under which pybind11 in a library shares its types."""
    names = re.findall(rb"__pybind11_internals_v\d\w+__(?=\0)", library.read_bytes())
    found: set[str] = {name.decode() for name in names if not name.endswith(b"_storage__")}
    if len(found) != 1:
        raise ValueError(f"{library}: expected one name of pybind11's internals, found {sorted(found)}")
    (name,) = found
    return name


def _defined(library: Path) -> Iterator[str]:
    yield from (line.split()[-1].partition("@")[0] for line in _nm("--defined-only", library))


def undefined(library: Path) -> set[str]:
    """Return what a library needs of others than the C and C++ libraries, whose symbols have versions."""
    symbols = (line.split()[-2:] for line in _nm("--undefined-only", library))
    return {name for kind, name in symbols if kind == "U" and "@" not in name}


def _nm(what: str, library: Path) -> list[str]:
    command = ["nm", "--dynamic", what, str(library)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
