"""The control groups of a process, of either version."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from .system_files import read_text

ROOT: Final = "/sys/fs/cgroup"


def group_folders(membership: str = "/proc/self/cgroup", root: str = ROOT) -> Iterator[tuple[str, list[str]]]:
    """Yield each controller of a process, and the folders of its group there and of that group's parents.

    In a container, those that are not mounted do not exist. Version 2 has one group for all controllers, named "".

    Args:
        membership: The file with the groups of the process.
        root: Where they are mounted.
    """
    for line in read_text(membership).splitlines():
        _, controllers, group = (*line.split(":", 2), "", "")[:3]
        for name in controllers.split(","):
            yield name, [*_upwards(os.path.join(root, _hierarchy(root, controllers, name)), group)]


def _hierarchy(root: str, controllers: str, name: str) -> str:
    """Return the folder of a hierarchy: version 2 beside others, controllers mounted together, or each on its own."""
    return next((own for own in (controllers or "unified", name) if os.path.isdir(os.path.join(root, own))), name)


def _upwards(folder: str, group: str) -> Iterator[str]:
    parts = [part for part in group.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield os.path.join(folder, *parts[:length])
