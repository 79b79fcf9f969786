"""GPUs, their drivers and RDMA devices of the host, as the kernel describes them. No driver is initialized."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from .system_files import list_folder, read_number, read_text

_MAX_DEVICES: Final = 64


def read_devices(root: str = "/") -> dict[str, Any]:
    """Return GPUs (`model`, and `numa_node` if known), versions of drivers, and ports of RDMA devices.

    Args:
        root: The folder that has `proc` and `sys`.
    """
    drivers = {name: version for name, version in _driver_versions(root) if version}
    facts = {
        "gpus": [*_nvidia_gpus(root), *_amd_gpus(root)][:_MAX_DEVICES],
        "drivers": drivers,
        "rdma_ports": [*_rdma_ports(root)][:_MAX_DEVICES],
    }
    return {name: value for name, value in facts.items() if value}


def _nvidia_gpus(root: str) -> Iterator[dict[str, Any]]:
    for address in list_folder(root, "proc/driver/nvidia/gpus"):
        match = re.search(r"^Model:\s*(.+)", read_text(root, "proc/driver/nvidia/gpus", address, "information"), re.M)
        yield {"model": match[1].strip() if match else "NVIDIA", **_numa_node(root, f"sys/bus/pci/devices/{address}")}


def _amd_gpus(root: str) -> Iterator[dict[str, Any]]:
    """Yield the nodes of AMD's topology that have a GPU; nodes of processors have no `gfx_target_version`."""
    for node in list_folder(root, "sys/class/kfd/kfd/topology/nodes"):
        folder = f"sys/class/kfd/kfd/topology/nodes/{node}"
        match = re.search(r"^gfx_target_version (\d+)", read_text(root, folder, "properties"), re.M)
        if match and int(match[1]):
            version = int(match[1])
            target = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
            yield {"model": f"AMD {target}"}


def _numa_node(root: str, folder: str) -> dict[str, int]:
    node = read_number(root, folder, "numa_node")  # -1 where the firmware does not know it
    return {} if node is None else {"numa_node": node}


def _driver_versions(root: str) -> Iterator[tuple[str, str]]:
    for name in ("nvidia", "amdgpu"):
        yield name, read_text(root, "sys/module", name, "version")


def _rdma_ports(root: str) -> Iterator[dict[str, Any]]:
    for device in list_folder(root, "sys/class/infiniband"):
        folder = f"sys/class/infiniband/{device}"
        for port in list_folder(root, folder, "ports"):
            facts = {key: read_text(root, folder, "ports", port, key) for key in ("state", "rate", "link_layer")}
            known = {key: text.partition(": ")[2] or text for key, text in facts.items() if text}
            yield {"name": f"{device}:{port}", **known, **_numa_node(root, f"{folder}/device")}
