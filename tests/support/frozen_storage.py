"""Storage that does not answer: a file system of its own that is frozen. It needs root, and a loop device."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

IMAGE_BYTES: Final = 64 << 20
MOST_SECONDS: Final = 60
"""Time after which storage answers again whatever happens: processes that wait for it cannot be killed."""


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[Path]:
    """Yield a folder on a file system of its own."""
    image, mount = folder / "storage.img", folder / "storage"
    mount.mkdir()
    with open(image, "wb") as file:
        file.truncate(IMAGE_BYTES)
    for command in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(mount)]):
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError as error:
            pytest.skip(f"{error.filename} is not installed")
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", mount], check=True)


def fill(mount: Path) -> None:
    """Leave no room on the file system, for data or for further files."""
    with open(mount / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    with contextlib.suppress(OSError):
        for number in range(IMAGE_BYTES):
            (mount / f"filler{number}").touch()


@contextlib.contextmanager
def frozen(mount: Path) -> Iterator[None]:
    """Let the file system keep whatever writes to it waiting."""
    thaw = ["fsfreeze", "--unfreeze", str(mount)]
    with subprocess.Popen(["sh", "-c", f"sleep {MOST_SECONDS}; {' '.join(thaw)}"], stderr=subprocess.DEVNULL) as later:
        subprocess.run(["fsfreeze", "--freeze", mount], check=True)
        try:
            yield
        finally:
            subprocess.run(thaw, check=True)
            later.kill()
