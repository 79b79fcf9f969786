"""Versions of the libraries that will run a configuration: those installed here."""

from __future__ import annotations

import re
from importlib import metadata


def version_in_use(library: str, otherwise: tuple[int, int]) -> tuple[int, int]:
    """Return the first two numbers of the installed version of a library; `otherwise` if it is not installed."""
    try:
        numbers = re.match(r"(\d+)\.(\d+)", metadata.version(library))
    except metadata.PackageNotFoundError:
        return otherwise
    return (int(numbers[1]), int(numbers[2])) if numbers is not None else otherwise
