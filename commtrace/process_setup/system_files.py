"""Small files of /proc and /sys, whose content is missing where it cannot be read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_LARGEST: Final = 1 << 16


def read_text(*parts: str | Path) -> str:
    """Return the first 64 KiB of a file without white space at its ends; "" if it cannot be read."""
    try:
        with open(os.path.join(*parts), "rb") as file:
            return file.read(_LARGEST).decode(errors="replace").strip()
    except (OSError, ValueError):
        return ""


def read_number(*parts: str | Path) -> int | None:
    """Return the decimal number that is all of a file; None if there is none, or if it is below 0."""
    text = read_text(*parts)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def list_folder(*parts: str | Path) -> Iterator[str]:
    """Yield the names in a folder, sorted; none if it cannot be read."""
    try:
        yield from sorted(os.listdir(os.path.join(*parts)))
    except OSError:
        return
