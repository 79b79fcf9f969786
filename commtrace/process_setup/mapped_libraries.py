"""Communication libraries that are loaded into this process, and their versions.

Which file is loaded decides, not which package is installed: LD_LIBRARY_PATH, LD_PRELOAD and plugins choose files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from .elf_files import ElfFile


class _Known(NamedTuple):
    """A library.

    Attributes:
        name: Its name in the log.
        file: Pattern of the whole name of its file.
        constant: Pattern of a constant that has the version in its first group.
        function: Function that returns the version.
    """

    name: str
    file: str
    constant: str = ""
    function: str = ""


_SO: Final = r"\.so[\d.]*"
_KNOWN: Final = (
    _Known("NCCL", rf"libnccl{_SO}", r"NCCL version (\d+\.\d+\.\d+(?:[.+-]\w[\w.]*)?)\0"),
    _Known("RCCL", rf"librccl{_SO}", r"[NR]CCL version :? ?(\d+\.\d+\.\d+(?:[.+-]\w[\w.]*)?)"),
    _Known("UCX", rf"libucp{_SO}", function="ucp_get_version_string"),
    _Known("libfabric", rf"libfabric{_SO}", r"(?:\A|\0)(\d+\.\d+\.\d+(?:rc\d+|a\d+|b\d+)?)(?=\0)"),
    _Known("Open MPI", r"libmpi\.so\.(?:40|80)[\d.]*", r"Open MPI [\w ]+ component version (\d+\.\d+\.\d+\w*)"),
    _Known("MPI", rf"libmpi(?:_\w+)?{_SO}"),
    _Known("MPI", rf"libmpich(?:_\w+)?{_SO}"),
    _Known("gloo", rf"libgloo{_SO}"),
    _Known("gloo", r"libtorch_cpu\.so"),
    _Known("UCC", rf"libucc{_SO}"),
    _Known("oneCCL", rf"libccl{_SO}"),
    _Known("NVSHMEM", rf"libnvshmem_host{_SO}"),
)
_PLUGIN: Final = r"lib[nr]ccl-(?:net|tuner|profiler|env)[-\w]*\.so[\d.]*|libnccl_ofi_tuner\.so[\d.]*"
_FILE: Final = re.compile(rf"(?:{'|'.join(known.file for known in _KNOWN)}|{_PLUGIN})(?: \(deleted\))?")
_DELETED: Final = " (deleted)"


class MappedLibraries:
    """Reader of the libraries of this process. Each file is read once."""

    def __init__(self, maps: str = "/proc/self/maps") -> None:
        self._maps = maps
        self._rows: dict[str, dict[str, str]] = {}

    def read(self) -> list[dict[str, str]]:
        """Return a row per library that is, or has been, loaded: its name, file, version and build.

        The version and build are missing if the file does not show them.
        """
        try:
            with open(self._maps, "rb") as file:
                maps = os.fsdecode(file.read())
        except OSError:
            return [*self._rows.values()]
        # The path is the rest of the line; no other field has a slash.
        for path in {line[line.find("/") :] for line in maps.split("\n") if "/" in line} - self._rows.keys():
            if _FILE.fullmatch(os.path.basename(path)):
                self._rows[path] = _row(path)
        return sorted(self._rows.values(), key=lambda row: (row["name"], row["file"]))


def _row(path: str) -> dict[str, str]:
    file_name = os.path.basename(path.removesuffix(_DELETED))
    known = next((each for each in _KNOWN if re.fullmatch(each.file, file_name)), None)
    row = {"name": f"plugin {file_name.partition('.')[0]}" if known is None else known.name, "file": path}
    if not path.endswith(_DELETED):  # a file at this path is another one
        row |= _content(path, known)
    return row


def _content(path: str, known: _Known | None) -> Mapping[str, str]:
    """Return version and build of the file at a path, as far as they can be read."""
    row: dict[str, str] = {}
    try:
        with open(path, "rb") as file:
            elf = ElfFile(file)
            row["build"] = elf.build()
            version = elf.only_constant(re.compile(known.constant.encode())) if known and known.constant else ""
            version = version or (elf.returned_text(known.function) if known and known.function else "")
            if version:
                row["version"] = version
    except (OSError, ValueError):
        pass
    return row
