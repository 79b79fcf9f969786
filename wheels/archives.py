"""Archives that are equal, byte by byte, if their contents are."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path


def repack(archive: Path, to: Path, seconds: int) -> None:
    """Write a .tar.gz again so that equal contents are equal files: members by name, all of one time and no owner."""
    with (
        tarfile.open(archive) as packed, to.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=seconds) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as written,
    ):  # fmt: skip
        for member in sorted(packed.getmembers(), key=lambda member: member.name):
            own = member.replace(mtime=seconds, uid=0, gid=0, uname="", gname="", deep=False)
            own.pax_headers = {}  # of sub-second times
            written.addfile(own, packed.extractfile(member) if member.isfile() else None)
