"""Cores and memory that this process may use: affinity, NUMA nodes, and limits of its control groups."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from typing import Any, Final

from .system_files import list_folder, read_number, read_text

_NODES: Final = "/sys/devices/system/node"
_CGROUPS: Final = "/sys/fs/cgroup"
_NO_MEMORY_LIMIT: Final = 1 << 60
"""Bytes from which a limit of version 1, whose largest number stands for none, limits nothing."""


def usable_cores() -> int:
    """Return the number of cores that this process may keep busy, at least 1: a container may have a part of a host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, math.ceil(read_limits().get("cpus") or cores))


def core_list() -> str:
    """Return the cores that the process may use, as the kernel writes lists ("0-3,8"); "" if not known."""
    return _allowed("Cpus")


def read_processors() -> dict[str, Any]:
    """Return the memory nodes that the process may use, and nodes and processor of the host; missing if not known."""
    facts = {
        "memory_nodes": _allowed("Mems"),
        "numa_nodes": {name[4:]: read_text(_NODES, name, "cpulist") for name in _node_names()},
        "processor": _processor_model(),
    }
    return {name: value for name, value in facts.items() if value}


def _allowed(kind: str) -> str:
    match = re.search(rf"^{kind}_allowed_list:\s*(\S+)", read_text("/proc/self/status"), re.MULTILINE)
    return match[1] if match else ""


def _node_names() -> list[str]:
    return sorted(
        (name for name in list_folder(_NODES) if re.fullmatch(r"node\d+", name)), key=lambda name: int(name[4:])
    )


def _processor_model() -> str:
    match = re.search(r"^model name\s*:\s*(.+)", read_text("/proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else ""


def read_limits(cgroups: str = _CGROUPS, membership: str = "/proc/self/cgroup") -> dict[str, float | int]:
    """Return the limits of the process's control groups, of either version: the lowest of each group and its parents.

    Returns:
        `cpus`: processor time per time; `memory_bytes`. A limit that is not set, or not known, is missing.
    """
    cpus: list[float] = []
    memory: list[int] = []
    for line in read_text(membership).splitlines():
        _, controllers, group = (*line.split(":", 2), "", "")[:3]
        names = controllers.split(",")
        if controllers == "":
            for folder in _folders(cgroups, "unified" if os.path.isdir(f"{cgroups}/unified") else "", group):
                cpus += _quota(*(*read_text(folder, "cpu.max").split(), "", "")[:2])
                memory += _bytes(folder, "memory.max")
        if "cpu" in names:
            for folder in _folders(cgroups, _mounted(cgroups, controllers, "cpu"), group):
                cpus += _quota(*(read_text(folder, f"cpu.cfs_{name}_us") for name in ("quota", "period")))
        if "memory" in names:
            for folder in _folders(cgroups, _mounted(cgroups, controllers, "memory"), group):
                memory += _bytes(folder, "memory.limit_in_bytes")
    lowest = {"cpus": min(cpus, default=None), "memory_bytes": min(memory, default=None)}
    return {name: value for name, value in lowest.items() if value is not None}


def _mounted(cgroups: str, controllers: str, name: str) -> str:
    return controllers if os.path.isdir(f"{cgroups}/{controllers}") else name


def _folders(cgroups: str, hierarchy: str, group: str) -> Iterator[str]:
    """Yield the folders of a group and of its parents. In a container, those that are not mounted do not exist."""
    root = os.path.join(cgroups, hierarchy)
    parts = [part for part in group.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield os.path.join(root, *parts[:length])


def _quota(quota: str, period: str) -> list[float]:
    """Return processor time per time of a quota in microseconds; [] without one."""
    if not (quota.isdecimal() and period.isdecimal() and int(period)):
        return []
    return [round(int(quota) / int(period), 3)]


def _bytes(folder: str, name: str) -> list[int]:
    number = read_number(folder, name)
    return [number] if number is not None and number < _NO_MEMORY_LIMIT else []
