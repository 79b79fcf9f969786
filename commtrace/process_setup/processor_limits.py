"""Cores and memory that this process may use: affinity, NUMA nodes, and limits of its control groups."""

from __future__ import annotations

import math
import os
import re
from typing import Any, Final

from .control_groups import ROOT, group_folders
from .system_files import list_folder, read_number, read_text

_NODES: Final = "/sys/devices/system/node"
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


def read_limits(root: str = ROOT, membership: str = "/proc/self/cgroup") -> dict[str, float | int]:
    """Return the limits of the process's control groups, of either version: the lowest of each group and its parents.

    Returns:
        `cpus`: processor time per time; `memory_bytes`. A limit that is not set, or not known, is missing.
    """
    cpus: list[float] = []
    memory: list[int] = []
    for controller, folders in group_folders(membership, root):
        for folder in folders:
            if controller == "":
                cpus += _quota(*(*read_text(folder, "cpu.max").split(), "", "")[:2])
                memory += _bytes(folder, "memory.max")
            elif controller == "cpu":
                cpus += _quota(*(read_text(folder, f"cpu.cfs_{name}_us") for name in ("quota", "period")))
            elif controller == "memory":
                memory += _bytes(folder, "memory.limit_in_bytes")
    lowest = {"cpus": min(cpus, default=None), "memory_bytes": min(memory, default=None)}
    return {name: value for name, value in lowest.items() if value is not None}


def _quota(quota: str, period: str) -> list[float]:
    """Return processor time per time of a quota in microseconds; [] without one."""
    if not (quota.isdecimal() and period.isdecimal() and int(period)):
        return []
    return [round(int(quota) / int(period), 3)]


def _bytes(folder: str, name: str) -> list[int]:
    number = read_number(folder, name)
    return [number] if number is not None and number < _NO_MEMORY_LIMIT else []
